"""The graph's views and its order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcnr.ids import NodeId
from dcnr.network.graph import Consumer, Port, sort_ids, topological_order
from tests.network.files import MANY, chain, shipped


def test_consumers_are_in_node_then_slot_order() -> None:
    """The order in which gradients are added."""
    net = chain()
    net.add("sum", "add", "embedder", "embedder")
    net.edges[0] = net.edges[0].replace("from: embedder", "from: sum")
    consumers = net.graph().consumers
    assert consumers[Port(NodeId("embedder"), 0)] == (Consumer(NodeId("sum"), 0), Consumer(NodeId("sum"), 1))
    assert Port(NodeId("loss"), 0) not in consumers


def test_topological_order_keeps_what_is_in_order() -> None:
    """Ties are broken by the present order, so an ordered graph stays as it is."""
    nodes = shipped("topology_1").nodes
    assert topological_order(nodes) == nodes
    assert {node.id for node in topological_order(nodes[::-1])} == {node.id for node in nodes}


def test_a_cycle_has_no_order() -> None:
    """The nodes on it are named."""
    first, *others = shipped("mlp").nodes
    nodes = [replace(first, inputs=(Port(NodeId("logits"), 0),)), *others]
    with pytest.raises(ValueError, match="cycle among embedder, hidden, gelu, logits, loss"):
        topological_order(nodes)


@MANY
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_sort_ids_orders_what_can_be_ordered(pairs: list[tuple[int, int]]) -> None:
    """Every id comes after its sources or is stuck behind a cycle; nothing is lost."""
    sources = {NodeId(str(index)): {NodeId(str(source)) for source, target in pairs if target == index} for index in range(10)}
    order, stuck = sort_ids(sources)
    assert sorted([*order, *stuck]) == sorted(sources)
    for index, name in enumerate(order):
        assert sources[name] <= set(order[:index])
    assert all(sources[name] & set(stuck) for name in stuck)
