"""What passes have in common: merging nodes and taking nodes out, with everything that refers to them following."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from dcnr.ids import NodeId
from dcnr.network.graph import Graph, GraphNode, Port, Sink, topological_order
from dcnr.nodes.base import Shape
from dcnr.nodes.spec import NodeConfig

Input = tuple[Port | None, Shape]
"""One input slot: where it comes from, and its shape."""


def only_reader(graph: Graph, node: GraphNode) -> tuple[GraphNode, int] | None:
    """(node, input slot) that alone reads the single output of `node`; None if there are several readers, or none."""
    readers = graph.consumers.get(Port(node.id, 0), ())
    if len(node.output_shapes) != 1 or len(readers) != 1:
        return None
    return graph.by_id[readers[0].node], readers[0].slot


def is_declared(graph: Graph, node: GraphNode) -> bool:
    """Whether a declared output reads the node: it must then stay visible."""
    return any(sink.port.node == node.id for sink in graph.outputs)


def same_storage(members: Sequence[GraphNode]) -> bool:
    """Whether all store activations in one precision, so that merging rounds nothing differently."""
    return len({member.activation_precision for member in members}) == 1


def same_place(members: Sequence[GraphNode]) -> bool:
    """Whether no two of them belong to different groups that placement must keep together, or that run again before their backward."""
    recomputed = {member.config.colocate_group if member.config.recompute else None for member in members}
    return len(_required(members)) <= 1 and len(recomputed) == 1


def trained_alike(members: Sequence[GraphNode]) -> bool:
    """Whether their parameters are stored in one precision and updated by one optimizer with the same settings."""
    kinds = {(node.param_precision, node.config.optimizer, node.config.learning_rate, node.config.weight_decay) for node in members}
    return len(kinds) == 1


def ties(graph: Graph, members: Sequence[GraphNode]) -> bool:
    """Whether one of them uses the weight of another node, or shares its own."""
    names = {member.id for member in members}
    return any(node.tied_to is not None and (node.id in names or node.tied_to in names) for node in graph.nodes)


def ports_of(node: GraphNode) -> list[Port]:
    """All outputs of a node."""
    return [Port(node.id, slot) for slot in range(len(node.output_shapes))]


def input_of(node: GraphNode, slot: int) -> Input:
    """One input of `node`, for a merged node to take over."""
    return node.inputs[slot], node.input_shapes[slot]


@dataclass(frozen=True, slots=True)
class Merge:
    """Nodes that become one of type `kind`, named after the last of them, whose outputs it has.

    `owner` is the member whose precisions and tie it takes over. `inner` are its further outputs: for each, the ports of members that
    stand for it, all of one shape; who reads one of them elsewhere reads the new output.
    """

    members: Sequence[GraphNode]
    kind: str
    config: NodeConfig
    inputs: Sequence[Input]
    owner: GraphNode
    inner: Sequence[Sequence[Port]] = ()

    def moved(self) -> dict[Port, Port]:
        """Where the inner ports are afterwards."""
        last = self.members[-1]
        return {port: Port(last.id, slot) for slot, ports in enumerate(self.inner, len(last.output_shapes)) for port in ports}


def merge(graph: Graph, merges: Sequence[Merge]) -> Graph:
    """`graph` with every one of `merges` done; no node is in two of them, and what lies inside one is read by nobody else, unless it is a
    further output.

    Declared outputs that existed only inside are dropped (who wants them runs the unfused graph); metrics and tied nodes follow.
    """
    merged = {one.members[-1].id: _merged(one) for one in merges}
    home = {member.id: one.members[-1].id for one in merges for member in one.members}
    gone = home.keys() - merged.keys()
    kept = (merged.get(node.id, node) for node in graph.nodes if node.id not in gone)
    moved = {old: new for one in merges for old, new in one.moved().items()}
    nodes = (
        replace(
            node,
            inputs=tuple(moved.get(port, port) if port is not None else None for port in node.inputs),
            tied_to=home.get(node.tied_to, node.tied_to) if node.tied_to is not None else None,
        )
        for node in kept
    )
    outputs = tuple(sink for sink in graph.outputs if sink.port.node not in gone)
    metrics = tuple(replace(sink, port=Port(home[sink.port.node], 0)) if sink.port.node in gone else sink for sink in graph.metrics)
    return replace(graph, nodes=topological_order(nodes), outputs=outputs, metrics=metrics)


def _merged(one: Merge) -> GraphNode:
    last = one.members[-1]
    shapes = {port: shape for member in one.members for port, shape in zip(ports_of(member), member.output_shapes, strict=True)}
    return GraphNode(
        id=last.id,
        type=one.kind,
        config=one.config.model_copy(update=_colocation(one.members)),
        inputs=tuple(port for port, _ in one.inputs),
        input_shapes=tuple(shape for _, shape in one.inputs),
        output_shapes=(*last.output_shapes, *(shapes[ports[0]] for ports in one.inner)),
        param_precision=one.owner.param_precision,
        activation_precision=one.owner.activation_precision,
        members=tuple(name for member in one.members for name in member.members),
        tied_to=one.owner.tied_to,
    )


def remove(graph: Graph, gone: Collection[NodeId], instead: Mapping[Port, Port]) -> Graph:
    """`graph` without the nodes `gone`. Who read a port of `instead` reads what it maps to; slots that read another port of them are left
    to the trainer, and sinks on such ports go too."""

    def follow(port: Port | None) -> Port | None:
        while port is not None and port in instead:
            port = instead[port]
        return None if port is None or port.node in gone else port

    def sinks(found: tuple[Sink, ...]) -> tuple[Sink, ...]:
        return tuple(replace(sink, port=port) for sink in found if (port := follow(sink.port)) is not None)

    kept = (node for node in graph.nodes if node.id not in gone)
    nodes = tuple(replace(node, inputs=tuple(follow(port) for port in node.inputs)) for node in kept)
    return replace(graph, nodes=nodes, outputs=sinks(graph.outputs), costs=sinks(graph.costs), metrics=sinks(graph.metrics))


def _colocation(members: Sequence[GraphNode]) -> dict[str, str | bool | None]:
    """The group that the members demand; failing that, the first they prefer. They agree on `recompute`."""
    recompute = {"recompute": members[0].config.recompute}
    required = _required(members)
    if required:
        return {"colocate_group": min(required), "colocate_policy": "required", **recompute}
    preferred = (member.config.colocate_group for member in members)
    group = next((group for group in preferred if group is not None), None)
    return {"colocate_group": group, "colocate_policy": "preferred", **recompute}


def _required(members: Sequence[GraphNode]) -> set[str]:
    configs = (member.config for member in members)
    return {config.colocate_group for config in configs if config.colocate_policy == "required" and config.colocate_group is not None}
