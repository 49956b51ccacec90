"""What the declared outputs of a network need of it: the nodes that lead from ids to them.

Rule 1: neither what works on text nor a cost is computed here; who asks for one is told.
Rule 2: who reads a tied matrix needs its owner, wherever that stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dcnr.errors import UserError
from dcnr.ids import NodeId
from dcnr.network.graph import Graph, Sink
from dcnr.network.shapes import is_cost
from dcnr.nodes.registry import NODE_TYPES
from dcnr.passes.precision import precision
from dcnr.passes.rewrite import remove
from dcnr.passes.tie_weights import tie_weights
from dcnr.passes.training_graph import made_of_text


def outputs_graph(graph: Graph, names: Sequence[str] = ()) -> Graph:
    """`graph` as far as its outputs `names` need it, all of them by default. Raises `UserError` for what is no output, or none of ids."""
    of_text = made_of_text(graph)
    graph = tie_weights(precision(graph))
    sinks = tuple(_declared(graph, name) for name in dict.fromkeys(names)) or graph.outputs
    if not sinks:
        raise UserError(f"network '{graph.name}' declares no outputs", "name them in its file: outputs: [{name: NAME, node_id: NODE}]")
    for sink in sinks:
        node = graph.by_id[sink.port.node]
        if node.id in of_text or is_cost(NODE_TYPES[node.type]):
            what = "works on text" if node.id in of_text else "is a cost; validation tells its loss"
            raise UserError(f"output '{sink.name}' cannot be computed from ids: node '{node.id}' ({node.type}) {what}", "ask for another")
    live = _leads_to(graph, sinks, of_text)
    graph = replace(graph, outputs=sinks, costs=(), metrics=())
    return remove(graph, {node.id for node in graph.nodes if node.id not in live}, {})


def _declared(graph: Graph, name: str) -> Sink:
    for sink in graph.outputs:
        if sink.name == name:
            return sink
    known = ", ".join(sink.name for sink in graph.outputs) or "none"
    raise UserError(f"network '{graph.name}' has no output '{name}'", f"it declares {known}; see `outputs:` in its file")


def _leads_to(graph: Graph, sinks: Sequence[Sink], of_text: set[NodeId]) -> set[NodeId]:
    live = {sink.port.node for sink in sinks}
    waiting = list(live)
    while waiting:
        node = graph.by_id[waiting.pop()]
        needed = {port.node for port in node.inputs if port is not None and port.node not in of_text}
        needed |= {node.tied_to} if node.tied_to is not None else set()
        waiting += needed - live
        live |= needed
    return live
