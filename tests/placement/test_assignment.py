"""What an assignment must keep to."""

from __future__ import annotations

import pytest

from dcnr.errors import InvariantError
from dcnr.ids import NodeId, PNodeId
from dcnr.passes import prepare
from dcnr.placement.assignment import Assignment
from tests.network.files import shipped

GRAPH = prepare(shipped("tiny"), fuse=True)
A, B = PNodeId("a"), PNodeId("b")
ALL_ON_A = {node.id: A for node in GRAPH.nodes}


def test_it_is_a_mapping_in_graph_order() -> None:
    """And can be read from both ends."""
    assignment = Assignment({**ALL_ON_A, NodeId("final_ln"): B})
    assert assignment[NodeId("final_ln")] == B
    assert dict(assignment) == dict(assignment.homes)
    assert assignment.pnodes == (A, B)
    assert assignment.nodes_of(B) == ("final_ln",)
    assert len(assignment) == len(GRAPH.nodes)
    assignment.validate(GRAPH)


def test_every_node_must_be_placed_and_nothing_else() -> None:
    """Names of the missing and the superfluous."""
    with pytest.raises(InvariantError, match="differ in the nodes embedder, ghost"):
        Assignment({**{node: A for node in ALL_ON_A if node != "embedder"}, NodeId("ghost"): A}).validate(GRAPH)


def test_ties_must_not_be_torn() -> None:
    """The message says why they belong together."""
    with pytest.raises(InvariantError, match=r"embedder, loss belong together .* but are on a, b"):
        Assignment({**ALL_ON_A, NodeId("loss"): B}).validate(GRAPH)
