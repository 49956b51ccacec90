"""Element-wise nodes join what they follow: linear + activation, dropout + add. One pass over memory instead of two.

Both members must store activations alike, and nothing else may read what lies between them.
"""

from __future__ import annotations

from typing import get_args

from dcnr.backends.base import Activation
from dcnr.network.graph import Graph, GraphNode
from dcnr.nodes.activation import DropoutAddConfig, DropoutConfig
from dcnr.nodes.linear import LinearActivationConfig, LinearConfig
from dcnr.passes.rewrite import input_of, is_declared, merge, only_reader, same_place, same_storage


def fuse_elementwise(graph: Graph) -> Graph:
    """`graph` with such pairs merged into `linear_activation` and `dropout_add`."""
    for name in tuple(graph.by_id):
        first = graph.by_id.get(name)
        reader = only_reader(graph, first) if first is not None else None
        if first is None or reader is None or is_declared(graph, first):
            continue
        second, slot = reader
        if same_storage([first, second]) and same_place([first, second]):
            graph = _fuse(graph, first, second, slot)
    return graph


def _fuse(graph: Graph, first: GraphNode, second: GraphNode, slot: int) -> Graph:
    if isinstance(first.config, LinearConfig):
        for activation in get_args(Activation):
            if second.type == activation:
                config = LinearActivationConfig.fuse(first.config, activation)
                return merge(graph, [first, second], "linear_activation", config, [input_of(first, 0)], first)
    if isinstance(first.config, DropoutConfig) and second.type == "add" and len(second.inputs) == 2 and slot == 0:
        inputs = [input_of(first, 0), input_of(second, 1)]
        return merge(graph, [first, second], "dropout_add", DropoutAddConfig.fuse(first.config), inputs, first)
    return graph
