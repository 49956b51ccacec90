"""What a node costs a PNode, and an edge the wire: estimates that placement compares, and `analyze` shows.

Floating-point operations count a multiplication and an addition as two; a backward is two forwards. Training state is float32 master
weights, a rounded copy where parameters are stored in less, one float32 gradient per row shard, and the optimizer's moments. Activations
are what a node holds between its forward and its backward (`memory`). Generation has none of that: weights, and what attention keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from dcnr.backends.base import width
from dcnr.ids import NodeId
from dcnr.network.graph import Graph, GraphNode, Port
from dcnr.network.instantiate import instantiate
from dcnr.nodes.registry import NODE_TYPES
from dcnr.placement.memory import Held, anywhere, held

BACKWARD = 2
"""Forwards that a backward costs: one product for the gradient of the input, one for that of the weight."""

SHARDS = 2
"""Gradient accumulators of a parameter, unless a session says otherwise."""

MOMENTS = {"sgd": 1, "adam": 2, "adamw": 2}


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Of one node, for the rows it was asked about."""

    flops: int
    """Of a forward and its backward."""
    parameters: int
    """Numbers that it owns."""
    parameter_bytes: int
    optimizer_bytes: int
    """Gradient accumulators and moments."""
    activation_bytes: int
    """From its forward to its backward."""
    again_bytes: int
    """More of them, while its group runs again (`recompute`)."""

    @property
    def bytes(self) -> int:
        """All memory that it takes for good: of what is there while a group runs again, only the largest group counts, once."""
        return self.parameter_bytes + self.optimizer_bytes + self.activation_bytes


def graph_costs(graph: Graph, rows: int, shards: int = SHARDS, place: Callable[[GraphNode], Hashable] = anywhere) -> dict[NodeId, NodeCost]:
    """What every node costs with `rows` batch rows in flight; nodes whose `place` is equal share the activations that both hold."""
    memory = held(graph, rows, place)
    return {node.id: _node_cost(node, rows, shards, memory[node.id]) for node in graph.nodes}


def reading_costs(graph: Graph, slots: int) -> dict[NodeId, NodeCost]:
    """What every node costs that generates: weights as they are stored, the caches of `slots` sequences, in float32 as some backends keep
    them, and one window that it gives.
    """
    return {node.id: _reading_cost(node, slots) for node in graph.nodes}


def _reading_cost(node: GraphNode, slots: int) -> NodeCost:
    row, size = NODE_TYPES[node.type], width(node.activation_precision)
    parameters = sum(math.prod(parameter.shape) for parameter in instantiate(node).parameters)
    cache = row.cache(node.config, node.input_shapes)
    kept = 0 if cache is None else math.prod(cache) * slots
    return NodeCost(
        flops=row.flops(node.config, node.input_shapes, node.output_shapes),
        parameters=parameters,
        parameter_bytes=parameters * width(node.param_precision),
        optimizer_bytes=0,
        activation_bytes=kept * 4 + sum(math.prod(shape) for shape in node.output_shapes) * size,
        again_bytes=0,
    )


def _node_cost(node: GraphNode, rows: int, shards: int, memory: Held) -> NodeCost:
    parameters = sum(math.prod(parameter.shape) for parameter in instantiate(node).parameters)
    flops = NODE_TYPES[node.type].flops(node.config, node.input_shapes, node.output_shapes)
    copy = 0 if node.param_precision == "float32" else width(node.param_precision)
    moments = MOMENTS[(node.config.optimizer or "adamw").lower()]
    return NodeCost(
        flops=flops * (1 + BACKWARD) * rows,
        parameters=parameters,
        parameter_bytes=parameters * (4 + copy),
        optimizer_bytes=parameters * 4 * (shards + moments),
        activation_bytes=memory.kept,
        again_bytes=memory.again,
    )


def edge_bytes(graph: Graph, port: Port, rows: int) -> int:
    """One tensor of `port` on the wire; its gradient is as large."""
    node = graph.by_id[port.node]
    return math.prod(node.output_shapes[port.slot]) * width(node.activation_precision) * rows
