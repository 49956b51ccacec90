"""The checked graph: what passes rewrite, placement divides and agents run.

Nodes stand in topological order (ties by their order in the file), every type and config is resolved, every shape known.
A graph is immutable; a pass returns a new one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from dcnr.ids import NetworkId, NodeId
from dcnr.nodes.base import Shape
from dcnr.nodes.spec import NodeConfig, StorePrecision


@dataclass(frozen=True, slots=True, order=True)
class Port:
    """Output slot `slot` of `node`."""

    node: NodeId
    slot: int


@dataclass(frozen=True, slots=True, order=True)
class Consumer:
    """Input slot `slot` of `node`."""

    node: NodeId
    slot: int


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One VNode, resolved."""

    id: NodeId
    type: str
    """Canonical name in NODE_TYPES."""
    config: NodeConfig
    inputs: tuple[Port | None, ...]
    """Where each input slot comes from; None where the trainer feeds it."""
    input_shapes: tuple[Shape, ...]
    """A fed slot has the shape of its ids or targets."""
    output_shapes: tuple[Shape, ...]
    param_precision: StorePrecision = "float32"
    activation_precision: StorePrecision = "float32"
    members: tuple[NodeId, ...] = ()
    """The nodes of the file that this one stands for; (id,) unless a pass merged some."""
    tied_to: NodeId | None = None
    """Owner of its weight, if that is another node."""


@dataclass(frozen=True, slots=True)
class Sink:
    """A declared output, cost or metric."""

    name: str
    port: Port
    type: str | None = None


@dataclass(frozen=True)
class Graph:
    """A network, resolved."""

    name: NetworkId
    nodes: tuple[GraphNode, ...]
    outputs: tuple[Sink, ...] = ()
    costs: tuple[Sink, ...] = ()
    metrics: tuple[Sink, ...] = field(default=())

    @cached_property
    def by_id(self) -> Mapping[NodeId, GraphNode]:
        """Nodes by id."""
        return {node.id: node for node in self.nodes}

    @cached_property
    def consumers(self) -> Mapping[Port, tuple[Consumer, ...]]:
        """Who reads each port, in node order then slot order; ports nobody reads are absent."""
        found: dict[Port, list[Consumer]] = defaultdict(list)
        for node in self.nodes:
            for slot, port in enumerate(node.inputs):
                if port is not None:
                    found[port].append(Consumer(node.id, slot))
        return {port: tuple(consumers) for port, consumers in found.items()}


def topological_order(nodes: Iterable[GraphNode]) -> tuple[GraphNode, ...]:
    """`nodes` sorted so that sources come first, ties by their present order. Raises `ValueError` on a cycle."""
    waiting = {node.id: node for node in nodes}
    done: dict[NodeId, GraphNode] = {}
    while waiting:
        ready = next((n for n in waiting.values() if all(p is None or p.node in done for p in n.inputs)), None)
        if ready is None:
            raise ValueError(f"cycle among {sorted(waiting)}")
        done[ready.id] = waiting.pop(ready.id)
    return tuple(done.values())
