"""Which precision each node stores its parameters and activations in.

The most special key wins: the node's `param_precision` (`activation_precision`), its `precision`, the network's default, float32.
A cost takes its input in `cost_precision`, since rounded logits cost more accuracy than they save.
"""

from __future__ import annotations

from dataclasses import replace

from dcnr.network.graph import Graph, GraphNode
from dcnr.nodes.cost import CostConfig
from dcnr.nodes.spec import StorePrecision, store_precision


def precision(graph: Graph) -> Graph:
    """`graph` with both precisions of every node settled."""
    return replace(graph, nodes=tuple(_settle(node) for node in graph.nodes))


def _settle(node: GraphNode) -> GraphNode:
    config = node.config
    activation = _first(config.activation_precision, config.precision, node.activation_precision)
    if isinstance(config, CostConfig):
        activation = config.cost_precision
    return replace(
        node, param_precision=_first(config.param_precision, config.precision, node.param_precision), activation_precision=activation
    )


def _first(special: str | None, general: str | None, default: StorePrecision) -> StorePrecision:
    said = special if special is not None else general
    return default if said is None else store_precision(said)
