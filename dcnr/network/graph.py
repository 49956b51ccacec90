"""The checked graph: what passes rewrite, placement divides and agents run.

Nodes stand in topological order (ties by their order in the file), every type and config is resolved, every shape known.
A graph is immutable; a pass returns a new one.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from dcnr.ids import NetworkId, NodeId
from dcnr.nodes.base import Shape
from dcnr.nodes.spec import NodeConfig, StorePrecision

Wire = Literal["native", "fp16", "int8"]
"""How floats travel between PNodes: as they are, or smaller."""


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
    wire: Wire = "native"

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
    by_id = {node.id: node for node in nodes}
    order, stuck = sort_ids({node.id: {port.node for port in node.inputs if port is not None} for node in by_id.values()})
    if stuck:
        raise ValueError(f"cycle among {', '.join(stuck)}")
    return tuple(by_id[name] for name in order)


def sort_ids(sources: Mapping[NodeId, set[NodeId]]) -> tuple[list[NodeId], list[NodeId]]:
    """(ids with sources first, ties by the order of the mapping; ids on or behind a cycle), after Kahn 1962.

    Sources that are no keys of the mapping count as there.
    """
    position = {name: index for index, name in enumerate(sources)}
    missing = {name: len(wanted & position.keys()) for name, wanted in sources.items()}
    readers: dict[NodeId, list[NodeId]] = defaultdict(list)
    for name, wanted in sources.items():
        for source in wanted & position.keys():
            readers[source].append(name)
    ready = [(position[name], name) for name, count in missing.items() if count == 0]
    order: list[NodeId] = []
    while ready:
        _, name = heapq.heappop(ready)
        order.append(name)
        for reader in readers[name]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, (position[reader], reader))
    return order, [name for name, count in missing.items() if count > 0]
