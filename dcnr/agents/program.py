"""A segment as two flat lists of operations: what the compute thread runs without asking anyone.

Rule 1: all names are resolved when it is compiled; at run time a tensor is an index into a list.
Rule 2: a node's inputs are cast to its activation precision, and gradients to that of the node that made the activation, before they
are added.
Rule 3: gradients of several uses are added in node order, then slot order.
Rule 4: a reference goes right after its last use, so that the pool can hand out its memory again.
Rule 5: consecutive nodes of a group with `recompute` are a block (after Chen et al. 2016): its forward keeps only what enters it, and its
backward runs that forward again first. Masks depend on seed, step and element alone, so nothing differs. Costs are in no block: their
forward adds to gradients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from types import TracebackType
from typing import NamedTuple, Self

from dcnr.agents.routing import SegmentRoutes, Use, sends_gradient
from dcnr.backends.base import Array, Backend, Precision, Scalar
from dcnr.errors import InvariantError
from dcnr.ids import NodeId
from dcnr.network.graph import Consumer, Graph, GraphNode, Port
from dcnr.nodes.base import Env, Node, Saved, Shape

NONE = -1
"""A register that does not exist."""


class _ForwardStep(NamedTuple):
    at: int
    node: Node
    inputs: tuple[int, ...]
    casts: tuple[tuple[int, Precision], ...]
    """(input slot, precision) of those that arrive in another one."""
    outputs: tuple[int, ...]
    last_uses: tuple[int, ...]
    keeps: bool
    """Whether what it saves is kept for its backward."""
    enters: tuple[int, ...] = ()
    """At the first of a block: the registers that enter it."""


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
    again: tuple[_ForwardStep, ...] = ()
    """At the first of a block: its forward."""


class Tape:
    """What one forward leaves for its backward: of one micro-batch, one row shard.

    As a context it notes on an error in which node it arose.
    """

    __slots__ = ("at", "entered", "nodes", "saved")

    def __init__(self, nodes: tuple[NodeId, ...]) -> None:
        self.nodes = nodes
        self.saved: list[Saved | None] = [None] * len(nodes)
        self.entered: dict[int, list[tuple[int, Array]]] = {}
        """Of every block, by its first node: (register, what entered there)."""
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
        self._evaluation = tuple(step._replace(keeps=False, enters=()) for step in self._forward)
        self._outputs = tuple(compiler.port_register[output.port] for output in routes.outputs)
        self._losses = tuple(compiler.port_register[Port(cost, 0)] for cost in routes.costs)
        self._backward = compiler.backward()
        self._gradients = len(compiler.use_register)
        self._incoming = tuple(compiler.use_register[entry.use] for entry in routes.incoming)
        self._outgoing = tuple(tuple(compiler.use_register[use] for use in entry.uses) for entry in routes.outgoing)

    def tape(self) -> Tape:
        """A fresh one for one forward and its backward."""
        return Tape(self.nodes)

    def forward(self, envs: Sequence[Env], inputs: Sequence[Array], tape: Tape) -> tuple[list[Array], list[Scalar]]:
        """(external outputs, losses of the costs), in the order of the routes. `envs` are one per node, `inputs` as `routes.inputs`."""
        return self._through(self._forward, envs, inputs, tape)

    def evaluate(self, envs: Sequence[Env], inputs: Sequence[Array]) -> tuple[list[Array], list[Scalar]]:
        """The same, of which nothing is kept for a backward."""
        return self._through(self._evaluation, envs, inputs, self.tape())

    def _through(
        self, steps: Iterable[_ForwardStep], envs: Sequence[Env], inputs: Sequence[Array], tape: Tape
    ) -> tuple[list[Array], list[Scalar]]:
        registers: list[Array | None] = [*inputs, *[None] * (self._registers - len(inputs))]
        with tape:
            _run(steps, envs, registers, tape)
        return [registers[register] for register in self._outputs], [registers[register] for register in self._losses]

    def backward(self, envs: Sequence[Env], gradients: Sequence[Array], tape: Tape) -> list[Array | None]:
        """Gradients of `routes.outgoing`, from those of `routes.incoming`; empties the tape."""
        registers: list[Array | None] = [None] * self._gradients
        for register, gradient in zip(self._incoming, gradients, strict=True):
            registers[register] = gradient
        saved = tape.saved
        with tape:
            for at, node, uses, cast, targets, again in self._backward:
                if again:
                    self._run_again(again, envs, tape)
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

    def _run_again(self, block: tuple[_ForwardStep, ...], envs: Sequence[Env], tape: Tape) -> None:
        """The forward of a block, for what its backward needs."""
        registers: list[Array | None] = [None] * self._registers
        for register, entered in tape.entered.pop(block[0].at, ()):
            registers[register] = entered
        _run(block, envs, registers, tape)


def _run(steps: Iterable[_ForwardStep], envs: Sequence[Env], registers: list[Array | None], tape: Tape) -> None:
    """Forward steps over `registers`, one after the other."""
    saved = tape.saved
    for at, node, sources, casts, targets, last_uses, keeps, enters in steps:
        tape.at = at
        env = envs[at]
        if enters:
            tape.entered[at] = [(register, registers[register]) for register in enters]
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
        self.blocks = self._blocks()

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
        wanted = {self.port_register[output.port] for output in self.routes.outputs}
        wanted |= {self.port_register[Port(cost, 0)] for cost in self.routes.costs}
        inside = {at for block in self.blocks for at in block}
        keeps = {at for at, node in enumerate(self.members) if node.id in self.routes.backward} - inside
        steps = self._steps(range(len(self.members)), keeps, wanted)
        entering = {block[0]: self._entering(block) for block in self.blocks}
        return tuple(step._replace(enters=entering.get(step.at, ())) for step in steps)

    def _again(self, block: range) -> tuple[_ForwardStep, ...]:
        return self._steps(block, {at for at in block if self.members[at].id in self.routes.backward}, ())

    def _steps(self, span: range, keeps: Collection[int], wanted: Collection[int]) -> tuple[_ForwardStep, ...]:
        """The forward of the nodes in `span`, which leaves the registers `wanted`."""
        last: dict[int, int] = {}
        for at in span:
            for register in (*self._reads(at), *self._targets(self.members[at])):
                last[register] = at
        return tuple(
            _ForwardStep(
                at=at,
                node=self.objects[self.members[at].id],
                inputs=self._reads(at),
                casts=self._casts(self.members[at]),
                outputs=self._targets(self.members[at]),
                last_uses=tuple(register for register, use in last.items() if use == at and register not in wanted),
                keeps=at in keeps,
            )
            for at in span
        )

    def _blocks(self) -> list[range]:
        """Those with a backward, by the positions of their nodes."""
        found = []
        for group, run in groupby(range(len(self.members)), lambda at: self._group(self.members[at])):
            positions = list(run)
            if group is not None and any(self.members[at].id in self.routes.backward for at in positions):
                found.append(range(positions[0], positions[-1] + 1))
        return found

    def _group(self, node: GraphNode) -> str | None:
        """The group that it is recomputed with."""
        return node.config.colocate_group if node.config.recompute and node.id not in self.routes.costs else None

    def _entering(self, block: range) -> tuple[int, ...]:
        made = {register for at in block for register in self._targets(self.members[at])}
        return tuple(dict.fromkeys(register for at in block for register in self._reads(at) if register not in made))

    def backward(self) -> tuple[_BackwardStep, ...]:
        by_port: dict[Port, list[Consumer]] = {}
        for use in self.use_register:
            by_port.setdefault(use.port, []).append(use.consumer)
        order = {node.id: index for index, node in enumerate(self.graph.nodes)}
        blocks = {max(at for at in block if self.members[at].id in self.routes.backward): block for block in self.blocks}
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
            again = self._again(blocks[at]) if at in blocks else ()
            steps.append(_BackwardStep(at, self.objects[node.id], uses, cast, self._results(node), again))
        return tuple(steps)

    def _reads(self, at: int) -> tuple[int, ...]:
        node = self.members[at]
        return tuple(self._source(node, slot) for slot in range(len(node.inputs)))

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
