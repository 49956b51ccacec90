"""What generation needs of a network: the nodes that lead from ids to the logits of the last position.

Rule 1: logits are the declared output of that name, or else what the first cost reads. Costs, text nodes and whatever does not lead
there go.
Rule 2: a sequence comes piece by piece, so every node must treat a position by itself, or with what a cache keeps of earlier ones.
Who does not is refused by name.
Rule 3: where nothing after it looks at other positions, only the last one goes on (`last_position`).
"""

from __future__ import annotations

from dataclasses import replace

from dcnr.errors import UserError
from dcnr.ids import NodeId
from dcnr.network.graph import Graph, GraphNode, Port, Sink, topological_order
from dcnr.network.shapes import feed_of, is_cost
from dcnr.nodes.cost import CostConfig, LmHeadCostConfig
from dcnr.nodes.registry import NODE_TYPES
from dcnr.nodes.spec import NodeConfig, common_keys
from dcnr.passes.rewrite import remove
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
    """`graph`, with a node before the last ones, each the only reader of the one before it."""
    (sink,) = graph.outputs
    first = graph.by_id[sink.port.node]
    if not _works_alone(first):
        return graph
    while (source := first.inputs[0]) is not None and _works_alone(before := graph.by_id[source.node]):
        if len(graph.consumers[source]) > 1 or len(before.output_shapes) > 1:
            break
        first = before
    if source is None or len(graph.by_id[source.node].output_shapes[source.slot]) != 2:
        return graph
    return _cut(graph, first, source)


def _works_alone(node: GraphNode) -> bool:
    """Whether it reads one tensor of numbers, position by position, and needs no earlier one."""
    cache = NODE_TYPES[node.type].cache(node.config, node.input_shapes)
    return len(node.inputs) == 1 and node.inputs[0] is not None and cache is None


def _cut(graph: Graph, first: GraphNode, source: Port) -> Graph:
    """`graph`, with the last position only from `first` on, which reads `source`."""
    maker, name = graph.by_id[source.node], NodeId("last_position")
    while name in graph.by_id:
        name = NodeId(f"{name[:63]}_")
    shape = maker.output_shapes[source.slot]
    config = NodeConfig(precision=maker.config.precision, activation_precision=maker.config.activation_precision)
    last = GraphNode(name, "last_position", config, (source,), (shape,), ((1, shape[-1]),), members=(name,))
    last = replace(last, activation_precision=maker.activation_precision)
    nodes, after = [], {Port(first.id, 0)}
    for node in graph.nodes:
        if node.id == first.id:
            node = replace(node, inputs=(Port(name, 0),))
        if node.id == first.id or node.inputs[0] in after:
            after.add(Port(node.id, 0))
            node = replace(node, input_shapes=tuple(map(_one, node.input_shapes)), output_shapes=tuple(map(_one, node.output_shapes)))
        nodes.append(node)
    return replace(graph, nodes=topological_order([*nodes, last]))


def _one(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, *shape[1:])
