"""Why a network was divided as it was, in sentences with numbers."""

from __future__ import annotations

from collections.abc import Sequence

from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Graph
from dcnr.placement.assignment import Assignment
from dcnr.placement.cost import NodeCost, graph_costs
from dcnr.placement.groups import together
from dcnr.placement.place import Host
from dcnr.placement.segments import cut_segments
from dcnr.placement.traffic import Crossing, crossings

MANY = 3
"""Nodes that a sentence names; of more it tells the number."""


def explain(graph: Graph, hosts: Sequence[Host], rows: int, assignment: Assignment) -> tuple[str, ...]:
    """Sentences about `assignment`, as `place` made it of the same arguments."""
    costs = graph_costs(graph, rows, place=lambda node: assignment[node.id])
    sent = crossings(graph, assignment, rows)
    return (
        _overview(graph, hosts, rows, assignment, costs),
        *(_stage(graph, pnode, assignment, costs) for pnode in assignment.pnodes),
        *(_crossing(crossing) for crossing in sent),
        *(_group(group.nodes, group.why) for group in together(graph) if group.why),
        *_idle(hosts, assignment),
    )


def _overview(graph: Graph, hosts: Sequence[Host], rows: int, assignment: Assignment, costs: dict[NodeId, NodeCost]) -> str:
    cores = {host.pnode: max(1, host.cores) for host in hosts}
    used = sum(cores[pnode] for pnode in assignment.pnodes)
    total = sum(cost.flops for cost in costs.values())
    slowest = max(assignment.pnodes, key=lambda pnode: _flops(assignment, pnode, costs) / cores[pnode])
    share = _flops(assignment, slowest, costs) / cores[slowest] / max(1.0, total / used)
    segments = len(cut_segments(graph, assignment))
    return (
        f"{len(graph.nodes)} nodes run on {_count(len(assignment.pnodes), 'PNode')} in {_count(segments, 'segment')}; "
        f"a step of {_count(rows, 'row')} takes {_giga(total)}. "
        f"The slowest stage, {slowest}, takes {share:.2f} times what a perfect balance would."
    )


def _stage(graph: Graph, pnode: PNodeId, assignment: Assignment, costs: dict[NodeId, NodeCost]) -> str:
    runs = [segment.nodes for segment in cut_segments(graph, assignment) if segment.pnode == pnode]
    spans = ", then ".join(_names(nodes) for nodes in runs)
    flops, total = _flops(assignment, pnode, costs), sum(cost.flops for cost in costs.values())
    memory = sum(costs[node].bytes for node in assignment.nodes_of(pnode))
    return (
        f"{pnode} holds {_count(len(assignment.nodes_of(pnode)), 'node')} ({spans}): {_giga(flops)}, "
        f"{flops / max(1, total):.0%} of the work, and {_bytes(memory)} of memory."
    )


def _crossing(crossing: Crossing) -> str:
    readers = ", ".join(f"'{reader.node}'" for reader in crossing.readers)
    return (
        f"{crossing.sender} sends '{crossing.port.node}' to {crossing.receiver} for {readers}: {_bytes(crossing.forward_bytes)} forward, "
        f"{_bytes(crossing.backward_bytes)} back."
    )


def _group(nodes: Sequence[NodeId], why: str) -> str:
    shown = ", ".join(f"'{node}'" for node in nodes) if len(nodes) <= MANY else f"'{nodes[0]}' to '{nodes[-1]}' ({len(nodes)} nodes)"
    return f"{shown} stay together: {why}."


def _idle(hosts: Sequence[Host], assignment: Assignment) -> tuple[str, ...]:
    idle = sorted(host.pnode for host in hosts if host.pnode not in assignment.pnodes)
    return (f"{', '.join(idle)} hold nothing: the network has no more parts, or they have no memory for one.",) if idle else ()


def _names(nodes: Sequence[NodeId]) -> str:
    return f"'{nodes[0]}'" if len(nodes) == 1 else f"'{nodes[0]}' to '{nodes[-1]}'"


def _flops(assignment: Assignment, pnode: PNodeId, costs: dict[NodeId, NodeCost]) -> int:
    return sum(costs[node].flops for node in assignment.nodes_of(pnode))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _giga(flops: int) -> str:
    return f"{flops / 1e9:.3g} GFLOP"


def _bytes(count: int) -> str:
    size, units = count / 2**10, ["KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.1f} {units[0]}"
