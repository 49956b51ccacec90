"""What every graph keeps to, from the loader and through every pass. What it refuses is a bug of ours, never the user's."""

from __future__ import annotations

from dcnr.errors import InvariantError
from dcnr.network.graph import Graph, GraphNode, Port
from dcnr.network.shapes import feed_of, is_cost
from dcnr.nodes.registry import NODE_TYPES


def verify(graph: Graph) -> None:
    """Raise `InvariantError` where `graph` contradicts itself."""
    seen: dict[str, GraphNode] = {}
    members: set[str] = set()
    for node in graph.nodes:
        _check(node.id not in seen, node, "its id is taken")
        _check(node.type in NODE_TYPES, node, f"unknown type {node.type}")
        _verify_inputs(node, seen)
        _check(bool(node.members) and not members & set(node.members), node, f"its members {node.members} are missing or elsewhere too")
        _check(node.id == node.members[-1], node, "it is not called after its last member")
        members.update(node.members)
        seen[node.id] = node
    for node in graph.nodes:
        owner = seen.get(node.tied_to) if node.tied_to is not None else None
        _check(node.tied_to is None or (owner is not None and owner.tied_to is None), node, f"tied to '{node.tied_to}', which owns nothing")
        _check(owner is None or owner.param_precision == node.param_precision, node, f"tied to '{node.tied_to}' in another precision")
    _verify_sinks(graph)


def _verify_inputs(node: GraphNode, seen: dict[str, GraphNode]) -> None:
    node_type = NODE_TYPES[node.type]
    arity = node_type.inputs(node.config)
    _check(len(node.inputs) == len(node.input_shapes) == (len(node.inputs) if arity is None else arity), node, "wrong number of inputs")
    _check(len(node.output_shapes) == node_type.outputs(node.config), node, "wrong number of outputs")
    for slot, port in enumerate(node.inputs):
        if port is None:
            _check(feed_of(node_type, slot) is not None, node, f"nothing comes into slot {slot}")
            continue
        _check(port.node in seen, node, f"slot {slot} reads '{port.node}', which does not stand before it")
        outputs = seen[port.node].output_shapes
        _check(port.slot < len(outputs), node, f"slot {slot} reads {port}, which does not exist")
        _check(
            outputs[port.slot] == node.input_shapes[slot], node, f"slot {slot} wants {node.input_shapes[slot]}, not {outputs[port.slot]}"
        )


def _verify_sinks(graph: Graph) -> None:
    for sink in (*graph.outputs, *graph.costs, *graph.metrics):
        if not _exists(graph, sink.port):
            raise InvariantError(f"network '{graph.name}': sink '{sink.name}' reads {sink.port}, which does not exist")
    costs = {node.id for node in graph.nodes if is_cost(NODE_TYPES[node.type])}
    if not (costs or graph.outputs) or costs != {sink.port.node for sink in graph.costs}:
        raise InvariantError(f"network '{graph.name}': its costs are {sorted(costs)}, not those it lists")


def _exists(graph: Graph, port: Port) -> bool:
    node = graph.by_id.get(port.node)
    return node is not None and port.slot < len(node.output_shapes)


def _check(right: bool, node: GraphNode, message: str) -> None:
    if not right:
        raise InvariantError(f"node '{node.id}' ({node.type}): {message}")
