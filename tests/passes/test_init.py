"""All passes together: what fusion must never change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from dcnr.network.graph import Graph
from dcnr.network.instantiate import instantiate
from dcnr.network.verify import verify
from dcnr.passes import ALWAYS, FUSING, PASSES, prepare
from tests.network.files import MANY, SHIPPED, Network, networks, shipped


def canonical(graph: Graph) -> dict[str, tuple[tuple[int, ...], float | None, float, bool]]:
    """Canonical name → (shape, std, fill, decay), from the parts of what is stored."""
    found = {}
    for node in graph.nodes:
        for parameter in instantiate(node).parameters:
            rows = np.zeros(parameter.shape[0], dtype=int)
            for part in parameter.parts:
                name = f"{part.node}.{part.name}"
                assert name not in found
                found[name] = ((part.stop - part.start, *parameter.shape[1:]), parameter.std, parameter.fill, parameter.decay)
                rows[part.start : part.stop] += 1
            assert (rows == 1).all(), "parts cover the rows once"
    return found


@MANY
@given(networks())
def test_fusion_never_changes_the_canonical_parameters(net: Network) -> None:
    """Same names, shapes and starting distributions, for any network."""
    graph = net.graph()
    assert canonical(prepare(graph, fuse=True)) == canonical(prepare(graph, fuse=False))


@MANY
@given(networks())
def test_members_are_the_nodes_of_the_unfused_graph(net: Network) -> None:
    """Every node is in one place, named after its last member; costs keep their ids."""
    graph = net.graph()
    plain, fused = prepare(graph, fuse=False), prepare(graph, fuse=True)
    assert sorted(member for node in fused.nodes for member in node.members) == sorted(node.id for node in plain.nodes)
    assert all(node.members[-1] == node.id for node in fused.nodes)
    assert fused.costs == plain.costs


@MANY
@given(networks())
def test_preparing_is_done_after_once(net: Network) -> None:
    """Every pass leaves its own result alone."""
    graph = net.graph()
    for one in PASSES:
        graph = one(graph)
        verify(graph)
        assert one(graph) == graph


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_networks_prepare_the_same_every_time(name: str) -> None:
    """Everyone runs the passes for himself and gets the same graph."""
    assert prepare(shipped(name), fuse=True) == prepare(shipped(name), fuse=True)


@pytest.mark.parametrize(("name", "plain", "fused"), [("topology_1", 140, 31), ("topology_2", 183, 38), ("tiny", 36, 12), ("mlp", 5, 3)])
def test_fusion_finds_its_work(name: str, plain: int, fused: int) -> None:
    """Text goes first; then heads, head + cost, linear + gelu, and each residual sum with what is before and after it."""
    assert (len(prepare(shipped(name), fuse=False).nodes), len(prepare(shipped(name), fuse=True).nodes)) == (plain, fused)


def test_passes_are_always_then_fusing() -> None:
    """In this order."""
    assert PASSES == ALWAYS + FUSING
