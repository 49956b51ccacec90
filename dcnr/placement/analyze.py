"""What a network is and costs, before anything runs: shapes, parameters, operations, memory, and what would cross machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dcnr.ids import NetworkId, NodeId, PNodeId
from dcnr.network.graph import Graph, GraphNode
from dcnr.nodes.base import Shape
from dcnr.passes import prepare
from dcnr.placement.cost import NodeCost, graph_costs
from dcnr.placement.memory import anywhere, most_again
from dcnr.placement.place import Host, place
from dcnr.placement.traffic import Crossing, crossings


@dataclass(frozen=True, slots=True)
class NodeAnalysis:
    """One node of the file. Nodes that training leaves out cost nothing."""

    node: NodeId
    type: str
    input_shapes: tuple[Shape, ...]
    output_shapes: tuple[Shape, ...]
    parameters: int
    """A tied matrix counts at its owner."""
    flops: int
    """Of one row, forward and backward."""
    activation_bytes: int
    """Held from forward to backward in the graph that runs, for all rows; those of merged nodes stand at the last of them."""
    pnode: PNodeId | None


@dataclass(frozen=True, slots=True)
class Analysis:
    """A whole network. Memory and traffic are of the graph that runs (fused or not), for `rows` batch rows in flight."""

    network: NetworkId
    vnodes: int
    parameters: int
    rows: int
    tokens_per_row: int
    """Targets of the first cost."""
    flops_per_row: int
    """Forward and backward."""
    flops_per_token: int
    parameter_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    recompute_bytes: int
    """On top of them, while the largest group with `recompute` runs again."""
    nodes: tuple[NodeAnalysis, ...]
    crossings: tuple[Crossing, ...]
    crossing_bytes: int
    """Forward and backward, of all crossings."""


def analyze(graph: Graph, rows: int, hosts: Sequence[Host] = (), fuse: bool = True) -> Analysis:
    """Analyse the graph of a file for `rows` batch rows, placed on `hosts` if there are any. Raises `DoesNotFit`."""
    running = prepare(graph, fuse)
    homes = dict(place(running, hosts, rows)) if hosts else {}
    sent = crossings(running, homes, rows) if homes else ()
    of_members = {member: homes.get(node.id) for node in running.nodes for member in node.members}
    plain = graph_costs(prepare(graph, fuse=False), 1)
    of_node = graph_costs(running, rows, place=(lambda node: homes[node.id]) if homes else anywhere)
    costs = list(of_node.values())
    tokens = _tokens_per_row(running)
    flops_per_row = sum(cost.flops for cost in costs) // rows
    return Analysis(
        network=graph.name,
        vnodes=len(graph.nodes),
        parameters=sum(cost.parameters for cost in costs),
        rows=rows,
        tokens_per_row=tokens,
        flops_per_row=flops_per_row,
        flops_per_token=flops_per_row // tokens,
        parameter_bytes=sum(cost.parameter_bytes for cost in costs),
        optimizer_bytes=sum(cost.optimizer_bytes for cost in costs),
        activation_bytes=sum(cost.activation_bytes for cost in costs),
        recompute_bytes=most_again(running, {node: cost.again_bytes for node, cost in of_node.items()}),
        nodes=tuple(_node(node, plain.get(node.id), of_node.get(node.id), of_members.get(node.id)) for node in graph.nodes),
        crossings=sent,
        crossing_bytes=sum(crossing.forward_bytes + crossing.backward_bytes for crossing in sent),
    )


def flops_per_token(running: Graph) -> int:
    """Operations of a prepared graph, forward and backward, for each target of the first cost."""
    return sum(cost.flops for cost in graph_costs(running, 1).values()) // _tokens_per_row(running)


def _node(node: GraphNode, trained: NodeCost | None, running: NodeCost | None, pnode: PNodeId | None) -> NodeAnalysis:
    parameters, flops = (trained.parameters, trained.flops) if trained is not None else (0, 0)
    held = running.activation_bytes if running is not None else 0
    return NodeAnalysis(node.id, node.type, node.input_shapes, node.output_shapes, parameters, flops, held, pnode)


def _tokens_per_row(graph: Graph) -> int:
    return math.prod(graph.by_id[graph.costs[0].port.node].input_shapes[0][:-1])
