"""The linear layer to the vocabulary and the cross-entropy that alone reads it become one node, so that nobody holds [tokens, vocabulary].

A declared output on the linear layer does not keep it: training does not pay for logits, and whoever asks for them runs the unfused graph.
"""

from __future__ import annotations

from dcnr.network.graph import Graph
from dcnr.nodes.cost import CostConfig, FusedLmHeadConfig
from dcnr.nodes.linear import LinearConfig
from dcnr.passes.rewrite import input_of, merge, only_reader, same_place


def fuse_lm_head(graph: Graph) -> Graph:
    """`graph` with every linear layer before a `ce_logits` cost merged into a `fused_lm_head`."""
    for name in tuple(graph.by_id):
        linear = graph.by_id.get(name)
        reader = only_reader(graph, linear) if linear is not None else None
        if linear is None or reader is None or not isinstance(linear.config, LinearConfig):
            continue
        cost, slot = reader
        if isinstance(cost.config, CostConfig) and cost.config.cost_function == "ce_logits" and slot == 0 and same_place([linear, cost]):
            config = FusedLmHeadConfig.fuse(linear.config, cost.config)
            graph = merge(graph, [linear, cost], "fused_lm_head", config, [input_of(linear, 0), input_of(cost, 1)], linear)
    return graph
