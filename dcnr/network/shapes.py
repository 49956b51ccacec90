"""The shapes of one node: what its type's rule computes, and what the trainer's feeds look like.

Shapes have no batch dimension. Ids look like the node's output without its last axis, targets like its first input without it;
text has no axes.
"""

from __future__ import annotations

from typing import NamedTuple

from dcnr.nodes.base import FeedKind, Shape
from dcnr.nodes.spec import NodeConfig, NodeType, ShapeError


class NodeShapes(NamedTuple):
    """Of every slot."""

    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]


def node_shapes(node_type: NodeType, config: NodeConfig, inputs: tuple[Shape | None, ...]) -> NodeShapes:
    """Shapes of a node whose edges bring `inputs` (None: fed by the trainer). Raises `ShapeError`."""
    outputs = node_type.shapes(config, inputs)
    filled = tuple(
        shape if shape is not None else _fed_shape(feed_of(node_type, slot), inputs, outputs) for slot, shape in enumerate(inputs)
    )
    return NodeShapes(filled, outputs)


def feed_of(node_type: NodeType, slot: int) -> FeedKind | None:
    """What the trainer sends into `slot` if no edge serves it; None if an edge is needed."""
    return node_type.feeds[slot] if slot < len(node_type.feeds) else None


def is_cost(node_type: NodeType) -> bool:
    """Whether the node takes targets and ends the forward."""
    return "targets" in node_type.feeds


def show(shape: Shape) -> str:
    """`[128, 512]`, as files write it."""
    return f"[{', '.join(str(extent) for extent in shape)}]"


def show_slots(count: int) -> str:
    """`1 slot`, `2 slots`."""
    return f"{count} slot{'s' if count != 1 else ''}"


def _fed_shape(feed: FeedKind | None, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> Shape:
    if feed == "text":
        return ()
    like = outputs[0] if feed == "ids" else inputs[0]
    if like is None:
        raise ShapeError("wants an edge into slot 0, got none")
    return like[:-1]
