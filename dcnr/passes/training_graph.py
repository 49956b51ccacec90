"""What training needs of a network: the nodes that lead to a cost, from ids on.

Rule 1: nodes that work on text go; where a tokenizer fed an embedder, the trainer's ids enter.
Rule 2: what leads to no cost goes: whatever only served a detokenizer or a declared output. None of it has parameters
(the loader sees to that).
Rule 3: a broadcast that is left with one reader is no node any more; who read it reads its source.
"""

from __future__ import annotations

from dcnr.ids import NodeId
from dcnr.network.graph import Graph
from dcnr.network.shapes import feed_of, is_cost
from dcnr.nodes.registry import NODE_TYPES
from dcnr.passes.rewrite import ports_of, remove


def training_graph(graph: Graph) -> Graph:
    """`graph` as far as a training step needs it."""
    live = _leads_to_cost(graph)
    graph = remove(graph, {node.id for node in graph.nodes if node.id not in live}, {})
    return without_lone_broadcasts(graph)


def _leads_to_cost(graph: Graph) -> set[NodeId]:
    of_text = made_of_text(graph)
    live: set[NodeId] = set()
    for node in reversed(graph.nodes):
        if is_cost(NODE_TYPES[node.type]) or node.id in live:
            live.add(node.id)
            live.update(port.node for port in node.inputs if port is not None and port.node not in of_text)
    return live


def made_of_text(graph: Graph) -> set[NodeId]:
    """Text nodes and what they feed, up to the slots that take ids or targets."""
    found: set[NodeId] = set()
    for node in graph.nodes:
        node_type = NODE_TYPES[node.type]
        needed = (port for slot, port in enumerate(node.inputs) if feed_of(node_type, slot) is None)
        if node_type.text_only or any(port is not None and port.node in found for port in needed):
            found.add(node.id)
    return found


def without_lone_broadcasts(graph: Graph) -> Graph:
    """`graph` without the broadcasts that have one reader."""
    broadcasts = (node for node in graph.nodes if node.type == "broadcast")
    lone = {node.id for node in broadcasts if sum(len(graph.consumers.get(port, ())) for port in ports_of(node)) == 1}
    sources = ((node, node.inputs[0]) for node in graph.nodes if node.id in lone)
    return remove(graph, lone, {port: source for node, source in sources if source is not None for port in ports_of(node)})
