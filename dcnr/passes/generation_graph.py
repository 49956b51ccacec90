"""What generation needs of a network: the nodes that lead from ids to the logits of the last position.

Rule 1: logits are the declared output of that name, or else what the first cost reads. Costs, text nodes and whatever does not lead
there go.
Rule 2: a sequence comes piece by piece, so every node must treat a position by itself, or with what a cache keeps of earlier ones.
Who does not is refused by name.
Rule 3: where nothing after it looks at other positions, only the last one goes on (`last_position`): as early as can be, and at the end
in any case.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from dcnr.errors import UserError
from dcnr.ids import NodeId
from dcnr.network.graph import Graph, GraphNode, Port, Sink, topological_order
from dcnr.network.shapes import feed_of, is_cost
from dcnr.nodes.cost import CostConfig, LmHeadCostConfig
from dcnr.nodes.registry import NODE_TYPES
from dcnr.nodes.spec import NodeConfig, common_keys
from dcnr.passes.rewrite import ports_of, remove
from dcnr.passes.training_graph import made_of_text, without_lone_broadcasts

LOGITS = "logits"
"""The declared output that says where they are, and the only one of a generation graph."""


def generation_graph(graph: Graph) -> Graph:
    """`graph` as far as generation needs it. Raises `UserError` that says why it cannot generate."""
    graph = replace(graph, nodes=tuple(map(_without_cost, graph.nodes)))
    port = _source(graph, _logits(graph))
    live = _leads_to(graph, port)
    _check(graph, live)
    graph = remove(graph, {node.id for node in graph.nodes if node.id not in live}, {})
    graph = replace(graph, outputs=(Sink(LOGITS, port),), costs=(), metrics=())
    return _from_last_position(without_lone_broadcasts(graph))


def _without_cost(node: GraphNode) -> GraphNode:
    """An LM head that computes its own cost as the linear layer in it."""
    if not isinstance(node.config, LmHeadCostConfig):
        return node
    config = node.config.linear.model_copy(update=common_keys(node.config))
    x = node.input_shapes[0]
    shapes = ((*x[:-1], node.config.vocab_size),)
    return replace(node, type="linear", config=config, inputs=node.inputs[:1], input_shapes=(x,), output_shapes=shapes)


def _logits(graph: Graph) -> Port:
    declared = next((sink.port for sink in graph.outputs if sink.name == LOGITS), None)
    if declared is not None:
        return declared
    how = "declare it under outputs: {name: logits, node_id: NODE}"
    for sink in graph.costs:
        cost = graph.by_id[sink.port.node]
        if cost.type == "linear":
            return Port(cost.id, 0)
        if isinstance(cost.config, CostConfig) and cost.config.cost_function == "ce_logits" and cost.inputs[0] is not None:
            return cost.inputs[0]
        raise UserError(f"network '{graph.name}': its first cost, node '{cost.id}' ({cost.type}), reads no logits", how)
    raise UserError(f"network '{graph.name}' says nowhere what its logits are", how)


def _source(graph: Graph, port: Port) -> Port:
    """Whoever made what comes out of broadcasts."""
    node = graph.by_id[port.node]
    source = node.inputs[0] if node.type == "broadcast" else None
    return port if source is None else _source(graph, source)


def _leads_to(graph: Graph, port: Port) -> set[NodeId]:
    of_text = made_of_text(graph)
    live = {port.node}
    for node in reversed(graph.nodes):
        if node.id in live:
            live.update(port.node for port in node.inputs if port is not None and port.node not in of_text)
    return live


def _check(graph: Graph, live: set[NodeId]) -> None:
    for node in graph.nodes:
        if node.id not in live:
            continue
        row = NODE_TYPES[node.type]
        why = "it is a cost" if is_cost(row) else row.mixes(node.config, node.input_shapes)
        if why is None and any(port is None and feed_of(row, slot) != "ids" for slot, port in enumerate(node.inputs)):
            why = "it is fed with something else than ids"
        if why is not None:
            raise UserError(
                f"network '{graph.name}' cannot generate text: node '{node.id}' ({node.type}): {why}",
                "generation reads positions one by one: use causal attention, and nodes that treat each position by itself",
            )


def _from_last_position(graph: Graph) -> Graph:
    """`graph`, with a node before the last ones, each the only reader of the one before it; or behind all of them."""
    (sink,) = graph.outputs
    port, alone = sink.port, set[NodeId]()
    while (before := _works_alone(graph, graph.by_id[port.node])) is not None:
        alone.add(port.node)
        port = before
    return _cut(graph, port, alone)


def _works_alone(graph: Graph, node: GraphNode) -> Port | None:
    """The one tensor that it reads position by position, if it needs no earlier one, and gives what it makes to one reader at most."""
    cache = NODE_TYPES[node.type].cache(node.config, node.input_shapes)
    readers = sum(len(graph.consumers.get(port, ())) for port in ports_of(node))
    return node.inputs[0] if len(node.inputs) == 1 and cache is None and readers <= 1 else None


def _cut(graph: Graph, source: Port, alone: Collection[NodeId]) -> Graph:
    """`graph`, with the last position only in the nodes `alone`, one of which reads `source`, or else in its output."""
    maker, name = graph.by_id[source.node], NodeId("last_position")
    while name in graph.by_id:
        name = NodeId(f"{name[:63]}_")
    shape = maker.output_shapes[source.slot]
    config = NodeConfig(precision=maker.config.precision, activation_precision=maker.config.activation_precision)
    last = GraphNode(name, "last_position", config, (source,), (shape,), ((1, shape[-1]),), members=(name,))
    nodes = [replace(last, activation_precision=maker.activation_precision)]
    for node in graph.nodes:
        if node.id in alone:
            inputs = tuple(Port(name, 0) if port == source else port for port in node.inputs)
            shapes = tuple(map(_one, node.input_shapes)), tuple(map(_one, node.output_shapes))
            node = replace(node, inputs=inputs, input_shapes=shapes[0], output_shapes=shapes[1])
        nodes.append(node)
    outputs = graph.outputs if alone else (Sink(LOGITS, Port(name, 0)),)
    return replace(graph, nodes=topological_order(nodes), outputs=outputs)


def _one(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, *shape[1:])
