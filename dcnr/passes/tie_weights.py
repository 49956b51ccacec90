"""Who owns a tied weight.

A node with `tie_weight_alias` uses the matrix of the node with that `shared_weight_alias`, in the owner's storage precision.
"""

from __future__ import annotations

from dataclasses import replace

from dcnr.network.graph import Graph, GraphNode


def tie_weights(graph: Graph) -> Graph:
    """`graph` with `tied_to` set."""
    owners = {alias: node for node in graph.nodes if (alias := node.config.shared_weight_alias) is not None}
    return replace(graph, nodes=tuple(_tie(node, owners) for node in graph.nodes))


def _tie(node: GraphNode, owners: dict[str, GraphNode]) -> GraphNode:
    if node.config.tie_weight_alias is None:
        return node
    owner = owners[node.config.tie_weight_alias]
    return replace(node, tied_to=owner.id, param_precision=owner.param_precision)
