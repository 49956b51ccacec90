"""A segment as two flat lists of operations: what the compute thread runs without asking anyone.

Rule 1: all names are resolved when it is compiled; at run time a tensor is an index into a list.
Rule 2: a node's inputs are cast to its activation precision, and gradients to that of the node that made the activation, before they
are added.
Rule 3: gradients of several uses are added in node order, then slot order.
Rule 4: a reference goes right after its last use, so that the pool can hand out its memory again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from dcnr.agents.routing import SegmentRoutes, Use, sends_gradient
from dcnr.backends.base import Array, Backend, Precision
from dcnr.errors import InvariantError
from dcnr.ids import NodeId
from dcnr.network.graph import Consumer, Graph, GraphNode, Port
from dcnr.nodes.base import Env, Node, Saved, Shape

NONE = -1
"""A register that does not exist."""


class _ForwardStep(NamedTuple):
    node: Node
    inputs: tuple[int, ...]
    casts: tuple[tuple[int, Precision], ...]
    """(input slot, precision) of those that arrive in another one."""
    outputs: tuple[int, ...]
    last_uses: tuple[int, ...]
    keeps: bool
    """Whether its backward will run."""


class _BackwardStep(NamedTuple):
    at: int
    """Index of its forward step, its Env and its saved arrays."""
    node: Node
    uses: tuple[tuple[int, ...], ...]
    """By output slot: the registers of the gradients to add."""
    cast: Precision | None
    """Where a gradient arrives in another precision: the node's own."""
    results: tuple[int, ...]
    """By input slot: the register of its gradient, or NONE."""


class Tape:
    """What one forward leaves for its backward: of one micro-batch, one row shard.

    As a context it notes on an error in which node it arose.
    """

    __slots__ = ("at", "nodes", "saved")

    def __init__(self, nodes: tuple[NodeId, ...]) -> None:
        self.nodes = nodes
        self.saved: list[Saved | None] = [None] * len(nodes)
        self.at = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            error.add_note(f"node '{self.nodes[self.at]}'")


class Program:
    """One segment, compiled. Stateless: any number of threads may run it, each with its own envs and tape."""

    def __init__(self, graph: Graph, routes: SegmentRoutes, nodes: Mapping[NodeId, Node]) -> None:
        self.routes = routes
        self.nodes = routes.nodes
        self.weighted = _weighted(graph, routes)
        self.output_shapes = tuple(_kind(graph, output.port, output.port.node) for output in routes.outputs)
        """(shape without rows, precision) of the external outputs."""
        self.gradient_shapes = tuple(_kind(graph, entry.use.port, entry.use.consumer.node) for entry in routes.outgoing)
        """The same of the outgoing gradients, which have the precision of the node that makes them."""
        compiler = _Compiler(graph, routes, nodes)
        self._forward = compiler.forward()
        self._registers = compiler.registers
        self._outputs = tuple(compiler.port_register[output.port] for output in routes.outputs)
        self._losses = tuple(compiler.port_register[Port(cost, 0)] for cost in routes.costs)
        self._backward = compiler.backward()
        self._gradients = len(compiler.use_register)
        self._incoming = tuple(compiler.use_register[entry.use] for entry in routes.incoming)
        self._outgoing = tuple(tuple(compiler.use_register[use] for use in entry.uses) for entry in routes.outgoing)

    def tape(self) -> Tape:
        """A fresh one for one forward and its backward."""
        return Tape(self.nodes)

    def forward(self, envs: Sequence[Env], inputs: Sequence[Array], tape: Tape) -> tuple[list[Array], list[float]]:
        """(external outputs, losses of the costs), in the order of the routes. `envs` are one per node, `inputs` as `routes.inputs`."""
        registers: list[Array | None] = [*inputs, *[None] * (self._registers - len(inputs))]
        saved = tape.saved
        with tape:
            for at, (node, sources, casts, targets, last_uses, keeps) in enumerate(self._forward):
                tape.at = at
                env = envs[at]
                arguments = [registers[source] for source in sources]
                for slot, precision in casts:
                    arguments[slot] = env.backend.cast(arguments[slot], precision)
                results, kept = node.forward(env, tuple(arguments))
                if keeps:
                    saved[at] = kept
                for target, result in zip(targets, results, strict=True):
                    registers[target] = result
                for register in last_uses:
                    registers[register] = None
        return [registers[register] for register in self._outputs], [_loss(registers[register]) for register in self._losses]

    def backward(self, envs: Sequence[Env], gradients: Sequence[Array], tape: Tape) -> list[Array | None]:
        """Gradients of `routes.outgoing`, from those of `routes.incoming`; empties the tape."""
        registers: list[Array | None] = [None] * self._gradients
        for register, gradient in zip(self._incoming, gradients, strict=True):
            registers[register] = gradient
        saved = tape.saved
        with tape:
            for at, node, uses, cast, targets in self._backward:
                tape.at = at
                env = envs[at]
                kept = saved[at]
                saved[at] = None
                if kept is None:
                    raise InvariantError("a backward without its forward")
                arriving = tuple([_total(registers, terms, env.backend, cast) for terms in uses])
                for target, result in zip(targets, node.backward(env, kept, arriving), strict=True):
                    if target != NONE:
                        registers[target] = result
        return [_total(registers, terms, envs[0].backend, None) for terms in self._outgoing]


def _total(registers: list[Array | None], terms: tuple[int, ...], backend: Backend, cast: Precision | None) -> Array | None:
    """The sum of the gradients in `terms`, which are freed; None if there are none."""
    if len(terms) == 1 and cast is None:
        gradient = registers[terms[0]]
        registers[terms[0]] = None
        return gradient
    found = [gradient for term in terms if (gradient := registers[term]) is not None]
    for term in terms:
        registers[term] = None
    if cast is not None:
        found = [backend.cast(gradient, cast) for gradient in found]
    if not found:
        return None
    return found[0] if len(found) == 1 else backend.add(found)


def _loss(value: Array | None) -> float:
    if not isinstance(value, float):
        raise InvariantError(f"a cost gave {type(value).__name__}, not its loss")
    return value


def _kind(graph: Graph, port: Port, maker: NodeId) -> tuple[Shape, Precision]:
    return graph.by_id[port.node].output_shapes[port.slot], graph.by_id[maker].activation_precision


def _weighted(graph: Graph, routes: SegmentRoutes) -> tuple[tuple[int, int | None, float], ...]:
    """Of every cost: (its position, the external input whose hop brings its weight, 1 / the targets of a row where none does)."""
    fed = {entry.consumers[0].node: index for index, entry in enumerate(routes.inputs) if entry.port is None}
    return tuple((routes.nodes.index(cost), fed.get(cost), 1.0 / _targets_per_row(graph.by_id[cost])) for cost in routes.costs)


def _targets_per_row(cost: GraphNode) -> int:
    return math.prod(cost.input_shapes[0][:-1])


class _Compiler:
    def __init__(self, graph: Graph, routes: SegmentRoutes, nodes: Mapping[NodeId, Node]) -> None:
        self.graph = graph
        self.routes = routes
        self.objects = nodes
        self.members = tuple(graph.by_id[node] for node in routes.nodes)
        self.input_register = {consumer: index for index, entry in enumerate(routes.inputs) for consumer in entry.consumers}
        self.port_register = self._ports()
        self.registers = len(routes.inputs) + len(self.port_register)
        self.use_register = {use: index for index, use in enumerate(self._uses())}

    def _ports(self) -> dict[Port, int]:
        ports = [Port(node.id, slot) for node in self.members for slot in range(len(node.output_shapes))]
        ports += [Port(cost, 0) for cost in self.routes.costs if Port(cost, 0) not in ports]
        return {port: len(self.routes.inputs) + index for index, port in enumerate(ports)}

    def _uses(self) -> list[Use]:
        inside = [
            Use(port, Consumer(node.id, slot))
            for node in self.members
            if node.id in self.routes.backward
            for slot, port in enumerate(node.inputs)
            if port is not None and sends_gradient(node, slot)
        ]
        return inside + [entry.use for entry in self.routes.incoming]

    def forward(self) -> tuple[_ForwardStep, ...]:
        reads = [tuple(self._source(node, slot) for slot in range(len(node.inputs))) for node in self.members]
        wanted = {self.port_register[output.port] for output in self.routes.outputs}
        wanted |= {self.port_register[Port(cost, 0)] for cost in self.routes.costs}
        last: dict[int, int] = {}
        for at, node in enumerate(self.members):
            for register in (*reads[at], *self._targets(node)):
                last[register] = at
        return tuple(
            _ForwardStep(
                node=self.objects[node.id],
                inputs=reads[at],
                casts=self._casts(node),
                outputs=self._targets(node),
                last_uses=tuple(register for register, use in last.items() if use == at and register not in wanted),
                keeps=node.id in self.routes.backward,
            )
            for at, node in enumerate(self.members)
        )

    def backward(self) -> tuple[_BackwardStep, ...]:
        by_port: dict[Port, list[Consumer]] = {}
        for use in self.use_register:
            by_port.setdefault(use.port, []).append(use.consumer)
        order = {node.id: index for index, node in enumerate(self.graph.nodes)}
        steps = []
        for at, node in reversed(list(enumerate(self.members))):
            if node.id not in self.routes.backward:
                continue
            readers = [
                sorted(by_port.get(Port(node.id, slot), ()), key=lambda consumer: (order[consumer.node], consumer.slot))
                for slot in range(len(self._targets(node)))
            ]
            uses = tuple(
                tuple(self.use_register[Use(Port(node.id, slot), consumer)] for consumer in consumers)
                for slot, consumers in enumerate(readers)
            )
            precisions = {self.graph.by_id[consumer.node].activation_precision for consumers in readers for consumer in consumers}
            cast = node.activation_precision if precisions - {node.activation_precision} else None
            steps.append(_BackwardStep(at, self.objects[node.id], uses, cast, self._results(node)))
        return tuple(steps)

    def _source(self, node: GraphNode, slot: int) -> int:
        port = node.inputs[slot]
        if port is not None and port in self.port_register:
            return self.port_register[port]
        return self.input_register[Consumer(node.id, slot)]

    def _targets(self, node: GraphNode) -> tuple[int, ...]:
        if node.id in self.routes.costs:
            return (self.port_register[Port(node.id, 0)],)
        return tuple(self.port_register[Port(node.id, slot)] for slot in range(len(node.output_shapes)))

    def _casts(self, node: GraphNode) -> tuple[tuple[int, Precision], ...]:
        return tuple(
            (slot, node.activation_precision)
            for slot, port in enumerate(node.inputs)
            if port is not None and self.graph.by_id[port.node].activation_precision != node.activation_precision
        )

    def _results(self, node: GraphNode) -> tuple[int, ...]:
        return tuple(
            NONE if port is None else self.use_register.get(Use(port, Consumer(node.id, slot)), NONE)
            for slot, port in enumerate(node.inputs)
        )
