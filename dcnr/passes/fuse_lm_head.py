"""The linear layer to the vocabulary and the cross-entropy that alone reads it become one node, so that nobody holds [tokens, vocabulary].

A declared output on the linear layer does not keep it: training does not pay for logits, and whoever asks for them runs the unfused graph.
"""

from __future__ import annotations

from dcnr.network.graph import Graph, GraphNode
from dcnr.nodes.cost import CostConfig, FusedLmHeadConfig
from dcnr.nodes.linear import LinearConfig
from dcnr.passes.rewrite import Merge, input_of, merge, only_reader, same_place


def fuse_lm_head(graph: Graph) -> Graph:
    """`graph` with every linear layer before a `ce_logits` cost merged into a `fused_lm_head`."""
    found = (_merge(graph, linear) for linear in graph.nodes)
    return merge(graph, [one for one in found if one is not None])


def _merge(graph: Graph, linear: GraphNode) -> Merge | None:
    reader = only_reader(graph, linear)
    if reader is None or not isinstance(linear.config, LinearConfig):
        return None
    cost, slot = reader
    if not isinstance(cost.config, CostConfig) or cost.config.cost_function != "ce_logits" or slot != 0 or not same_place([linear, cost]):
        return None
    config = FusedLmHeadConfig.fuse(linear.config, cost.config)
    return Merge([linear, cost], "fused_lm_head", config, [input_of(linear, 0), input_of(cost, 1)], linear)
