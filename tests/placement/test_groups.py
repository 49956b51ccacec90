"""What stays together."""

from __future__ import annotations

from dcnr.network.load import load_graph
from dcnr.passes import prepare
from dcnr.placement.groups import preferred, together
from tests.network.files import EXAMPLE, chain, shipped


def test_every_node_is_in_one_group_in_graph_order() -> None:
    """Groups are ordered by their first node."""
    graph = prepare(shipped("topology_1"), fuse=False)
    groups = together(graph)
    order = [node.id for node in graph.nodes]
    assert sorted(node for group in groups for node in group.nodes) == sorted(order)
    firsts = [order.index(group.nodes[0]) for group in groups]
    assert firsts == sorted(firsts)
    assert all([order.index(node) for node in group.nodes] == sorted(order.index(node) for node in group.nodes) for group in groups)


def test_ties_required_groups_and_logits_bind() -> None:
    """Each with its reason; bonds that share a node make one group."""
    found: dict[tuple[str, ...], str] = {
        tuple(group.nodes): group.why for group in together(prepare(load_graph(EXAMPLE, "e.yml"), fuse=False)) if group.why
    }
    assert set(found) == {("embedder", "lm_head", "loss"), ("head_0", "head_1")}
    assert "'lm_head' uses the weight of 'embedder'" in found["embedder", "lm_head", "loss"]
    assert "the cost 'loss' reads the output of 'lm_head'" in found["embedder", "lm_head", "loss"]
    assert found["head_0", "head_1"] == "colocate_group 'transformer_block_0' is required"


def test_preferred_groups_are_wishes() -> None:
    """They bind nothing."""
    net = chain(("a", "relu", {"colocate_group": "g"}), ("b", "relu", {"colocate_group": "g"}))
    graph = prepare(net.graph(), fuse=True)
    assert preferred(graph) == (("a", "b"),)
    assert [group.nodes for group in together(graph)] == [("embedder",), ("a",), ("b",), ("loss",)]
