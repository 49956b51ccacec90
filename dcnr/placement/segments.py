"""What runs in one dispatch: the nodes of one PNode between two borders.

stage(v) = max over sources p of stage(p) + (pnode(p) != pnode(v)); a segment is all nodes of one PNode and stage. It is convex: a path that
leaves the PNode comes back at a higher stage. Segments, ordered by stage, run one after another without waiting for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Graph


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes in graph order. `index` is the place among all segments of the network, sources first."""

    index: int
    pnode: PNodeId
    nodes: tuple[NodeId, ...]


def cut_segments(graph: Graph, assignment: Mapping[NodeId, PNodeId]) -> tuple[Segment, ...]:
    """The segments of `graph`, placed by `assignment`."""
    stage: dict[NodeId, int] = {}
    members: dict[tuple[int, PNodeId], list[NodeId]] = {}
    for node in graph.nodes:
        here = assignment[node.id]
        before = (stage[port.node] + (assignment[port.node] != here) for port in node.inputs if port is not None)
        stage[node.id] = max(before, default=0)
        members.setdefault((stage[node.id], here), []).append(node.id)
    # A sort keeps segments of one stage in the order of their first node.
    ordered = sorted(members.items(), key=lambda item: item[0][0])
    return tuple(Segment(index, pnode, tuple(nodes)) for index, ((_, pnode), nodes) in enumerate(ordered))
