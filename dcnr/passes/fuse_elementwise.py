"""Element-wise nodes join what they follow: linear + activation, dropout + add. One pass over memory instead of two.

Both members must store activations alike, and nothing else may read what lies between them.
"""

from __future__ import annotations

from typing import get_args

from dcnr.backends.base import Activation
from dcnr.network.graph import Graph, GraphNode
from dcnr.nodes.activation import DropoutAddConfig, DropoutConfig
from dcnr.nodes.linear import LinearActivationConfig, LinearConfig
from dcnr.passes.rewrite import Merge, input_of, is_declared, merge, only_reader, same_place, same_storage


def fuse_elementwise(graph: Graph) -> Graph:
    """`graph` with such pairs merged into `linear_activation` and `dropout_add`."""
    found = (_merge(graph, first) for first in graph.nodes)
    return merge(graph, [one for one in found if one is not None])


def _merge(graph: Graph, first: GraphNode) -> Merge | None:
    reader = only_reader(graph, first)
    if reader is None or is_declared(graph, first):
        return None
    second, slot = reader
    pair = [first, second]
    if not same_storage(pair) or not same_place(pair):
        return None
    if isinstance(first.config, LinearConfig):
        activation = next((one for one in get_args(Activation) if one == second.type), None)
        if activation is not None:
            return Merge(pair, "linear_activation", LinearActivationConfig.fuse(first.config, activation), [input_of(first, 0)], first)
    if isinstance(first.config, DropoutConfig) and second.type == "add" and len(second.inputs) == 2 and slot == 0:
        inputs = [input_of(first, 0), input_of(second, 1)]
        return Merge(pair, "dropout_add", DropoutAddConfig.fuse(first.config), inputs, first)
    return None
