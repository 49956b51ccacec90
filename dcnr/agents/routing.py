"""Who gets what: every tensor that crosses the border of a segment, and where it goes.

Rule 1: a PNode gets one copy of a tensor, however many slots read it there. All outputs of a broadcast are one tensor.
Rule 2: a gradient is of one use (an input slot that read an output slot) and goes back by itself, so that sums never depend on placement.
Only where all uses of an output are in one segment, they are summed there, in the order in which the maker would.
Rule 3: between segments of one PNode tensors go by reference (`Local`); only `Remote` ones become hops.
Rule 4: slots that take ids or targets send no gradient back, so what leads to a cost only through such a slot gets none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Consumer, Graph, GraphNode, Port
from dcnr.network.shapes import feed_of
from dcnr.nodes.base import Shape
from dcnr.nodes.registry import NODE_TYPES
from dcnr.placement.segments import Segment, cut_segments


@dataclass(frozen=True, slots=True)
class Use:
    """One reading of an output port: it takes the activation there, and sends one gradient back."""

    port: Port
    consumer: Consumer


@dataclass(frozen=True, slots=True)
class Local:
    """Input (or incoming gradient) `index` of another segment on the same PNode."""

    segment: int
    index: int


@dataclass(frozen=True, slots=True)
class Remote:
    """Slots on another PNode."""

    pnode: PNodeId
    targets: tuple[tuple[NodeId, int], ...]


@dataclass(frozen=True, slots=True)
class ExternalInput:
    """A tensor from outside: of `port`, or, where that is None, ids or targets from the trainer. `shape` is without batch rows."""

    port: Port | None
    consumers: tuple[Consumer, ...]
    shape: Shape
    from_host: bool
    """Comes over the wire, so it lies in host memory."""


@dataclass(frozen=True, slots=True)
class ExternalOutput:
    """A tensor that others need."""

    port: Port
    local: tuple[Local, ...]
    remote: tuple[Remote, ...]


@dataclass(frozen=True, slots=True)
class IncomingGradient:
    """The gradient of a use outside (or of several, summed there; then `use` is the first)."""

    use: Use
    from_host: bool


@dataclass(frozen=True, slots=True)
class OutgoingGradient:
    """The gradient of `uses` inside, all of one port outside, to be summed in this order. It goes by the name of the first."""

    uses: tuple[Use, ...]
    to: Local | Remote

    @property
    def use(self) -> Use:
        """Its name."""
        return self.uses[0]


@dataclass(frozen=True, slots=True)
class SegmentRoutes:
    """One segment and its borders. `nodes` in graph order; `backward` are those that have a backward."""

    index: int
    nodes: tuple[NodeId, ...]
    backward: frozenset[NodeId]
    costs: tuple[NodeId, ...]
    inputs: tuple[ExternalInput, ...]
    outputs: tuple[ExternalOutput, ...]
    incoming: tuple[IncomingGradient, ...]
    outgoing: tuple[OutgoingGradient, ...]

    @property
    def turns_around(self) -> bool:
        """Whether its backward needs nothing but its own forward."""
        return bool(self.backward) and not self.incoming


@dataclass(frozen=True)
class Routes:
    """All nodes and segments of one PNode."""

    hosted: tuple[NodeId, ...]
    segments: tuple[SegmentRoutes, ...]

    @cached_property
    def inputs(self) -> Mapping[Consumer, Local]:
        """Where the tensor for an input slot goes."""
        return {
            consumer: Local(segment.index, index)
            for segment in self.segments
            for index, entry in enumerate(segment.inputs)
            for consumer in entry.consumers
        }

    @cached_property
    def gradients(self) -> Mapping[Use, Local]:
        """Where the gradient of a use goes."""
        return {entry.use: Local(segment.index, index) for segment in self.segments for index, entry in enumerate(segment.incoming)}


def find_routes(graph: Graph, assignment: Mapping[NodeId, PNodeId], pnode: PNodeId, reader: PNodeId | None = None) -> Routes:
    """The routes of `pnode`'s part of `graph`. `reader` gets the declared outputs."""
    return _Router(graph, assignment, reader).routes(pnode)


def cost_nodes(graph: Graph) -> tuple[NodeId, ...]:
    """The nodes that give losses, in graph order: also the order in which losses are added within a micro-batch."""
    declared = {sink.port.node for sink in graph.costs}
    return tuple(node.id for node in graph.nodes if node.id in declared)


def sends_gradient(node: GraphNode, slot: int) -> bool:
    """Whether what an input slot reads gets a gradient from it: not if the trainer would feed that slot."""
    return feed_of(NODE_TYPES[node.type], slot) is None


class _Router:
    def __init__(self, graph: Graph, assignment: Mapping[NodeId, PNodeId], reader: PNodeId | None) -> None:
        self.graph = graph
        self.reader = reader
        self.assignment = assignment
        self.segments: tuple[Segment, ...] = cut_segments(graph, assignment)
        self.segment_of = {node: segment for segment in self.segments for node in segment.nodes}
        self.learns = self._learns()
        self.inputs = {segment.index: self._inputs(segment) for segment in self.segments}
        self.gradients = self._gradients()
        self.incoming = {segment.index: self._incoming(segment) for segment in self.segments}

    def routes(self, pnode: PNodeId) -> Routes:
        hosted = tuple(node.id for node in self.graph.nodes if self.assignment[node.id] == pnode)
        return Routes(hosted, tuple(self._segment(segment) for segment in self.segments if segment.pnode == pnode))

    def _segment(self, segment: Segment) -> SegmentRoutes:
        return SegmentRoutes(
            index=segment.index,
            nodes=segment.nodes,
            backward=self.learns.intersection(segment.nodes),
            costs=tuple(node for node in cost_nodes(self.graph) if node in segment.nodes),
            inputs=self.inputs[segment.index],
            outputs=self._outputs(segment),
            incoming=self.incoming[segment.index],
            outgoing=self._outgoing(segment),
        )

    def _learns(self) -> frozenset[NodeId]:
        """Nodes that get a gradient, and the costs, which start it."""
        found = set(cost_nodes(self.graph))
        for node in reversed(self.graph.nodes):
            if node.id in found:
                found.update(port.node for slot, port in enumerate(node.inputs) if port is not None and sends_gradient(node, slot))
        return frozenset(found)

    def _tensor(self, port: Port) -> Port:
        """The port under which a tensor is known: all outputs of a broadcast are the same."""
        return Port(port.node, 0) if self.graph.by_id[port.node].type == "broadcast" else port

    def _outside(self, segment: Segment, port: Port) -> bool:
        return self.segment_of[port.node] is not segment

    def _inputs(self, segment: Segment) -> tuple[ExternalInput, ...]:
        readers: dict[Port | Consumer, list[Consumer]] = defaultdict(list)
        for node in self._members(segment):
            for slot, port in enumerate(node.inputs):
                if port is None or self._outside(segment, port):
                    readers[Consumer(node.id, slot) if port is None else self._tensor(port)].append(Consumer(node.id, slot))
        return tuple(self._input(segment, source, tuple(consumers)) for source, consumers in readers.items())

    def _input(self, segment: Segment, source: Port | Consumer, consumers: tuple[Consumer, ...]) -> ExternalInput:
        if isinstance(source, Consumer):
            return ExternalInput(None, consumers, self.graph.by_id[source.node].input_shapes[source.slot], from_host=True)
        shape = self.graph.by_id[source.node].output_shapes[source.slot]
        return ExternalInput(source, consumers, shape, from_host=self.segment_of[source.node].pnode != segment.pnode)

    def _outputs(self, segment: Segment) -> tuple[ExternalOutput, ...]:
        found: dict[Port, tuple[list[Local], dict[PNodeId, list[tuple[NodeId, int]]]]] = {}
        for other in self.segments:
            for index, entry in enumerate(self.inputs[other.index]):
                if entry.port is None or self._outside(segment, entry.port):
                    continue
                local, remote = found.setdefault(entry.port, ([], {}))
                if other.pnode == segment.pnode:
                    local.append(Local(other.index, index))
                else:
                    remote.setdefault(other.pnode, []).extend((consumer.node, consumer.slot) for consumer in entry.consumers)
        reader = self.reader
        if reader is not None:
            for sink in self.graph.outputs:
                if not self._outside(segment, sink.port):
                    found.setdefault(sink.port, ([], {}))[1][reader] = [(NodeId(reader), 0)]
        return tuple(
            ExternalOutput(port, tuple(local), tuple(Remote(pnode, tuple(targets)) for pnode, targets in remote.items()))
            for port, (local, remote) in found.items()
        )

    def _incoming(self, segment: Segment) -> tuple[IncomingGradient, ...]:
        return tuple(
            IncomingGradient(uses[0], from_host=self._reader(uses[0]).pnode != segment.pnode)
            for uses in self.gradients
            if not self._outside(segment, uses[0].port) and self._reader(uses[0]) is not segment
        )

    def _outgoing(self, segment: Segment) -> tuple[OutgoingGradient, ...]:
        return tuple(
            OutgoingGradient(uses, self._way_back(segment, uses[0]))
            for uses in self.gradients
            if self._outside(segment, uses[0].port) and self._reader(uses[0]) is segment
        )

    def _reader(self, use: Use) -> Segment:
        return self.segment_of[use.consumer.node]

    def _gradients(self) -> tuple[tuple[Use, ...], ...]:
        """Uses by the gradient that speaks for them: in node then slot order of the first."""
        by_port: dict[Port, list[Use]] = defaultdict(list)
        for use in self._uses():
            by_port[use.port].append(use)
        return tuple(together for uses in by_port.values() for together in self._together(uses))

    def _together(self, uses: list[Use]) -> list[tuple[Use, ...]]:
        """As one, if they are in one segment and of the maker's precision, so that summing here or there gives the same bits."""
        maker = self.graph.by_id[uses[0].port.node].activation_precision
        alike = all(self.graph.by_id[use.consumer.node].activation_precision == maker for use in uses)
        one_segment = len({self._reader(use).index for use in uses}) == 1
        return [tuple(uses)] if alike and one_segment else [(use,) for use in uses]

    def _way_back(self, segment: Segment, use: Use) -> Local | Remote:
        maker = self.segment_of[use.port.node]
        if maker.pnode != segment.pnode:
            return Remote(maker.pnode, ((use.port.node, use.port.slot),))
        return Local(maker.index, [entry.use for entry in self.incoming[maker.index]].index(use))

    def _uses(self) -> tuple[Use, ...]:
        """Every use that sends a gradient back, in node then slot order."""
        return tuple(
            Use(port, Consumer(node.id, slot))
            for node in self.graph.nodes
            if node.id in self.learns
            for slot, port in enumerate(node.inputs)
            if port is not None and sends_gradient(node, slot)
        )

    def _members(self, segment: Segment) -> tuple[GraphNode, ...]:
        return tuple(self.graph.by_id[node] for node in segment.nodes)
