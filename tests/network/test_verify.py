"""The invariants of every graph: each break of one is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dcnr.errors import InvariantError
from dcnr.ids import NodeId
from dcnr.network.graph import Graph, Port, Sink
from dcnr.network.verify import verify
from tests.network.files import shipped

GRAPH = shipped("mlp")
HIDDEN, GELU = NodeId("hidden"), NodeId("gelu")


def change(node: NodeId, **fields: object) -> Graph:
    """The graph with one node altered."""
    return replace(GRAPH, nodes=tuple(replace(one, **fields) if one.id == node else one for one in GRAPH.nodes))  # type: ignore[arg-type]


BROKEN: dict[str, tuple[Callable[[], Graph], str]] = {
    "order": (lambda: replace(GRAPH, nodes=GRAPH.nodes[::-1]), "which does not stand before it"),
    "id twice": (lambda: replace(GRAPH, nodes=(*GRAPH.nodes, GRAPH.nodes[0])), "its id is taken"),
    "unknown type": (lambda: change(GELU, type="gilu"), "unknown type gilu"),
    "number of inputs": (lambda: change(GELU, inputs=()), "wrong number of inputs"),
    "number of outputs": (lambda: change(GELU, output_shapes=()), "wrong number of outputs"),
    "empty slot": (lambda: change(GELU, inputs=(None,)), "nothing comes into slot 0"),
    "missing port": (lambda: change(GELU, inputs=(Port(HIDDEN, 3),)), "which does not exist"),
    "shape": (lambda: change(GELU, input_shapes=((1, 2),)), r"wants \(1, 2\), not \(32, 128\)"),
    "no members": (lambda: change(GELU, members=()), "its members"),
    "member twice": (lambda: change(GELU, members=(HIDDEN, GELU)), "its members"),
    "name": (lambda: change(GELU, members=(GELU, NodeId("other"))), "not called after its last member"),
    "tied to nothing": (lambda: change(HIDDEN, tied_to=NodeId("nobody")), "which owns nothing"),
    "tied in another precision": (lambda: change(HIDDEN, tied_to=NodeId("logits"), param_precision="float16"), "in another precision"),
    "sink": (lambda: replace(GRAPH, outputs=(Sink("o", Port(GELU, 1)),)), "sink 'o' reads"),
    "costs": (lambda: replace(GRAPH, costs=()), "not those it lists"),
}


def test_a_sound_graph_passes() -> None:
    """Nothing is raised."""
    verify(GRAPH)


@pytest.mark.parametrize(("broken", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_every_break_is_found(broken: Callable[[], Graph], message: str) -> None:
    """With the node and what is wrong."""
    with pytest.raises(InvariantError, match=message):
        verify(broken())
