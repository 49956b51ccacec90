"""Segments are convex, whatever the assignment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Graph
from dcnr.passes import prepare
from dcnr.placement.segments import Segment, cut_segments
from tests.network.files import MANY, Network, chain, networks


def edges(graph: Graph) -> list[tuple[NodeId, NodeId]]:
    """(source, target) of every edge."""
    return [(port.node, node.id) for node in graph.nodes for port in node.inputs if port is not None]


def reachable(graph: Graph, start: set[NodeId]) -> set[NodeId]:
    """Everything behind `start`."""
    found = set(start)
    for node in graph.nodes:
        if any(port is not None and port.node in found for port in node.inputs):
            found.add(node.id)
    return found


def convex(graph: Graph, segment: Segment) -> bool:
    """Whether no path leaves the segment and comes back."""
    inside = set(segment.nodes)
    left = {target for source, target in edges(graph) if source in inside and target not in inside}
    return not (reachable(graph, left) & inside)


@MANY
@given(networks(), st.data(), st.booleans())
def test_segments_are_convex_and_ordered(net: Network, data: st.DataObject, fuse: bool) -> None:
    """Any assignment at all: every node in one segment, on its PNode, sources in the same or an earlier one."""
    graph = prepare(net.graph(), fuse)
    names = st.sampled_from([PNodeId("a"), PNodeId("b"), PNodeId("c")])
    assignment = {node.id: data.draw(names, label=node.id) for node in graph.nodes}
    segments = cut_segments(graph, assignment)
    assert [segment.index for segment in segments] == list(range(len(segments)))
    home = {node: segment for segment in segments for node in segment.nodes}
    assert sorted(home) == sorted(node.id for node in graph.nodes)
    assert sum(len(segment.nodes) for segment in segments) == len(graph.nodes)
    assert all(home[node].pnode == assignment[node] for node in home)
    assert all(home[source].index <= home[target].index for source, target in edges(graph))
    assert all(convex(graph, segment) for segment in segments)


def test_a_pnode_that_is_come_back_to_has_two_segments() -> None:
    """a, then b, then a."""
    graph = prepare(chain(("mid", "layernorm", {"dim": 8})).graph(), fuse=True)
    assignment = {node.id: PNodeId("b" if node.id == "mid" else "a") for node in graph.nodes}
    assert [(segment.pnode, segment.nodes) for segment in cut_segments(graph, assignment)] == [
        ("a", ("embedder",)),
        ("b", ("mid",)),
        ("a", ("loss",)),
    ]


def test_one_pnode_has_one_segment() -> None:
    """In graph order."""
    graph = prepare(chain().graph(), fuse=False)
    (segment,) = cut_segments(graph, {node.id: PNodeId("a") for node in graph.nodes})
    assert segment.nodes == tuple(node.id for node in graph.nodes)
