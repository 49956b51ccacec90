"""From a graph node to the object that computes."""

from __future__ import annotations

from dcnr.network.graph import GraphNode
from dcnr.nodes.base import Node
from dcnr.nodes.registry import NODE_TYPES
from dcnr.nodes.spec import BuildArgs


def instantiate(node: GraphNode) -> Node:
    """The node's forward and backward, with the parameters it owns."""
    return NODE_TYPES[node.type].build(
        BuildArgs(node.id, node.config, node.input_shapes, node.output_shapes, node.tied_to is not None, node.members or (node.id,))
    )
