"""What an assignment sends over the wire: every tensor that crosses from one PNode to another, with its bytes.

Forward, a PNode gets one copy of a tensor, however many slots read it there; backward, every reader sends its own gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Consumer, Graph, Port
from dcnr.network.shapes import feed_of
from dcnr.nodes.registry import NODE_TYPES
from dcnr.placement.cost import edge_bytes


@dataclass(frozen=True, slots=True)
class Crossing:
    """One tensor on its way from `sender` to `receiver`, and its gradients on theirs back."""

    port: Port
    readers: tuple[Consumer, ...]
    """The input slots that read it at the receiver."""
    sender: PNodeId
    receiver: PNodeId
    forward_bytes: int
    backward_bytes: int


def crossings(graph: Graph, assignment: Mapping[NodeId, PNodeId], rows: int) -> tuple[Crossing, ...]:
    """All of them for `rows` batch rows, in graph order."""
    readers: dict[tuple[Port, PNodeId], list[Consumer]] = {}
    for node in graph.nodes:
        for slot, port in enumerate(node.inputs):
            if port is not None and assignment[port.node] != assignment[node.id]:
                tensor = Port(port.node, 0) if graph.by_id[port.node].type == "broadcast" else port
                readers.setdefault((tensor, assignment[node.id]), []).append(Consumer(node.id, slot))
    found = (_crossing(graph, port, receiver, tuple(consumers), assignment, rows) for (port, receiver), consumers in readers.items())
    order = {node.id: index for index, node in enumerate(graph.nodes)}
    return tuple(sorted(found, key=lambda crossing: (order[crossing.port.node], crossing.port.slot, crossing.receiver)))


def _crossing(
    graph: Graph, port: Port, receiver: PNodeId, readers: tuple[Consumer, ...], assignment: Mapping[NodeId, PNodeId], rows: int
) -> Crossing:
    size = edge_bytes(graph, port, rows)
    learning = sum(feed_of(NODE_TYPES[graph.by_id[reader.node].type], reader.slot) is None for reader in readers)
    return Crossing(port, readers, assignment[port.node], receiver, size, size * learning)
