"""What the nodes of a graph hold between their forward and their backward.

Rule 1: a tensor that several nodes of one place hold is counted once, at the first of them. All outputs of a broadcast, and what a reshape
gives, are the tensor that went in. A node that takes its input in another precision holds a copy.
Rule 2: of a group with `recompute` only what enters it stays; the rest is there while its forward runs again, one group at a time.
Rule 3: nodes say what they keep (`NodeType.keeps`), as GPUs run them; a CPU holds the probabilities of attention as well. Gradients, and
what an operation needs while it runs, come on top.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from dcnr.backends.base import width
from dcnr.ids import NodeId
from dcnr.network.graph import Consumer, Graph, GraphNode, Port
from dcnr.network.shapes import is_cost
from dcnr.nodes.registry import NODE_TYPES

ID_BYTES = 8
BY_REFERENCE = ("broadcast", "reshape")
"""Types whose outputs are their input's memory."""

Tensor = tuple[Hashable, ...]
"""What two nodes that hold the same memory call it."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one node: from its forward to its backward, and while its group runs again."""

    kept: int
    again: int = 0


def anywhere(node: GraphNode) -> Hashable:
    """For a graph whose nodes are all in one place."""
    return None


def held(graph: Graph, rows: int, place: Callable[[GraphNode], Hashable] = anywhere) -> Mapping[NodeId, Held]:
    """By node, with `rows` batch rows in flight; nodes whose `place` is equal share memory."""
    counter = _Counter(graph, rows)
    found: dict[NodeId, Held] = {}
    for _, members in groupby(graph.nodes, lambda node: (recomputed_with(node), place(node))):
        run = list(members)
        home = place(run[0])
        if recomputed_with(run[0]) is None:
            found |= {node.id: Held(counter.new(counter.keeps(node, home))) for node in run}
        else:
            found |= counter.block(run, home)
    return found


def most_again(graph: Graph, again: Mapping[NodeId, int]) -> int:
    """Bytes of the largest group among the nodes of `again`, which says what each holds while its group runs again."""
    nodes = [node for node in graph.nodes if node.id in again]
    runs = [sum(again[node.id] for node in members) for _, members in groupby(nodes, recomputed_with)]
    return max(runs, default=0)


def recomputed_with(node: GraphNode) -> str | None:
    """The group with which its forward runs again; costs, whose forward adds to gradients, run once."""
    return node.config.colocate_group if node.config.recompute and not is_cost(NODE_TYPES[node.type]) else None


class _Counter:
    def __init__(self, graph: Graph, rows: int) -> None:
        self._graph = graph
        self._rows = rows
        self._seen: set[Tensor] = set()

    def new(self, tensors: Mapping[Tensor, int]) -> int:
        """Bytes of those that were not counted yet, for all rows."""
        fresh = tensors.keys() - self._seen
        self._seen |= fresh
        return sum(tensors[tensor] for tensor in fresh) * self._rows

    def block(self, run: Sequence[GraphNode], home: Hashable) -> dict[NodeId, Held]:
        """A group that is recomputed: each tensor that enters counts where it is read first."""
        makers = (node for node in run if node.type not in BY_REFERENCE)
        made: set[Tensor] = {(home, Port(node.id, slot)) for node in makers for slot in range(len(node.output_shapes))}
        entering = [{name: size for name, size in self._inputs(node, home) if name not in made} for node in run]
        kept = [self.new(tensors) for tensors in entering]
        before = self._seen.copy()
        again = [self.new(self.keeps(node, home)) for node in run]
        self._seen = before
        return {node.id: Held(*sizes) for node, sizes in zip(run, zip(kept, again, strict=True), strict=True)}

    def keeps(self, node: GraphNode, home: Hashable) -> dict[Tensor, int]:
        """Bytes of one row of every tensor that it holds."""
        said = NODE_TYPES[node.type].keeps(node.config, node.input_shapes, node.output_shapes)
        size = width(node.activation_precision)
        inputs = list(self._inputs(node, home))
        found = {}
        for slot in said.inputs:
            name, nbytes = inputs[slot]
            port = node.inputs[slot]
            if port is not None and self._graph.by_id[port.node].activation_precision != node.activation_precision:
                name, nbytes = (*name, node.activation_precision), math.prod(node.input_shapes[slot]) * size
            found[name] = nbytes
        for slot in said.outputs:
            found[(home, *self._root(Port(node.id, slot)))] = math.prod(node.output_shapes[slot]) * size
        found[(node.id,)] = said.own * size + said.floats * 4
        return found

    def _inputs(self, node: GraphNode, home: Hashable) -> Iterator[tuple[Tensor, int]]:
        """(name, bytes of one row) of the tensors that it reads, as they come."""
        for slot, (port, shape) in enumerate(zip(node.inputs, node.input_shapes, strict=True)):
            if port is None:
                yield (home, Consumer(node.id, slot)), math.prod(shape) * ID_BYTES
            else:
                yield (home, *self._root(port)), math.prod(shape) * width(self._graph.by_id[port.node].activation_precision)

    def _root(self, port: Port) -> Tensor:
        """The output whose memory it is."""
        maker = self._graph.by_id[port.node]
        source = maker.inputs[0] if maker.type in BY_REFERENCE else None
        return (port,) if source is None else self._root(source)
