"""What a picture of a network shows: boxes and arrows, with repetition folded so that a network of 183 nodes fits a page.

Rule 1: ids like `block_3_ln1` name a block, `block_3`. Blocks that follow each other and are alike become one, in a frame with a count.
Rule 2: nodes that stand side by side and are alike (heads between one broadcast and one stack) become one box with a count.
Rule 3: nothing is lost: a box knows every node that it stands for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcnr.ids import NodeId
from dcnr.network.graph import Graph, GraphNode
from dcnr.network.shapes import show

_BLOCK = re.compile(r"(?P<block>.*?[0-9]+)[_-](?P<part>.+)")
_OWN_NAMES = {"colocate_group", "colocate_policy", "shared_weight_alias", "tie_weight_alias"}
"""Config keys that differ between blocks which are alike."""


@dataclass(frozen=True, slots=True)
class Box:
    """One node, or several that are alike side by side; `nodes` also has those of the blocks folded onto this one."""

    id: NodeId
    title: str
    subtitle: str
    type: str
    nodes: tuple[NodeId, ...]
    frame: str | None


@dataclass(frozen=True, slots=True)
class Arrow:
    """From box to box, by id."""

    source: NodeId
    target: NodeId


@dataclass(frozen=True, slots=True)
class Picture:
    """Boxes in graph order. `frames` has the label of every frame."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    frames: Mapping[str, str]


def picture(graph: Graph) -> Picture:
    """`graph`, folded."""
    first_of, frames = _fold_blocks(graph)
    shown = {node.id: first_of.get(node.id, node.id) for node in graph.nodes}
    beside = _fold_beside([node for node in graph.nodes if shown[node.id] == node.id], shown)
    shown = {node: beside.get(home, home) for node, home in shown.items()}
    standing_for: dict[NodeId, list[NodeId]] = {}
    for node, home in shown.items():
        standing_for.setdefault(home, []).append(node)
    width = {home: sum(first_of.get(node, node) == node for node in nodes) for home, nodes in standing_for.items()}
    boxes = tuple(_box(graph.by_id[home], nodes, width[home], frames) for home, nodes in standing_for.items())
    arrows = dict.fromkeys(
        Arrow(shown[port.node], shown[node.id])
        for node in graph.nodes
        for port in node.inputs
        if port is not None and not _between_folded(port.node, node.id, first_of)
    )
    return Picture(boxes, tuple(arrows), frames)


def block_of(node: NodeId) -> str | None:
    """The block that an id names."""
    found = _BLOCK.fullmatch(node)
    return found["block"] if found else None


def blocks(graph: Graph) -> dict[str, tuple[GraphNode, ...]]:
    """Nodes of every block that has at least two, in graph order."""
    found: dict[str, list[GraphNode]] = {}
    for node in graph.nodes:
        name = block_of(node.id)
        if name is not None:
            found.setdefault(name, []).append(node)
    return {name: tuple(nodes) for name, nodes in found.items() if len(nodes) > 1}


def _fold_blocks(graph: Graph) -> tuple[dict[NodeId, NodeId], dict[str, str]]:
    """(node of a later block → its like in the first, label of the frame of each first block)."""
    first_of: dict[NodeId, NodeId] = {}
    runs: list[list[str]] = []
    members = blocks(graph)
    for name, nodes in members.items():
        before = runs[-1][-1] if runs else None
        if before is not None and _follows(nodes, members[before], before):
            runs[-1].append(name)
            first_of.update(zip((node.id for node in nodes), (node.id for node in members[runs[-1][0]]), strict=True))
        else:
            runs.append([name])
    frames = {run[0]: f"{run[0]} … {run[-1]}: {len(run)} ×" for run in runs if len(run) > 1}
    return first_of, frames


def _follows(nodes: Sequence[GraphNode], before: Sequence[GraphNode], block: str) -> bool:
    """Whether `nodes` are like those of the block before, and read nothing but that and themselves."""
    mine = {node.id for node in nodes}
    outside = {port.node for node in nodes for port in node.inputs if port is not None and port.node not in mine}
    return bool(outside) and all(block_of(name) == block for name in outside) and _signature(nodes) == _signature(before)


def _signature(nodes: Sequence[GraphNode]) -> list[object]:
    number = {node.id: index for index, node in enumerate(nodes)}
    return [
        (
            node.type,
            node.config.model_dump(exclude=_OWN_NAMES),
            [(number.get(port.node), port.slot if port.node in number else 0) if port is not None else None for port in node.inputs],
            node.output_shapes,
        )
        for node in nodes
    ]


def _between_folded(source: NodeId, target: NodeId, first_of: Mapping[NodeId, NodeId]) -> bool:
    """Whether an edge leads from one folded block to the next: the frame says so already."""
    return target in first_of and block_of(source) != block_of(target)


def _fold_beside(nodes: Sequence[GraphNode], shown: Mapping[NodeId, NodeId]) -> dict[NodeId, NodeId]:
    """Node → the first of those beside it that are alike: same type, config, source and readers."""
    readers: dict[NodeId, set[NodeId]] = {}
    for node in nodes:
        for port in node.inputs:
            if port is not None:
                readers.setdefault(shown[port.node], set()).add(node.id)
    first: dict[object, NodeId] = {}
    found: dict[NodeId, NodeId] = {}
    for node in nodes:
        if len(node.inputs) == 1 and node.inputs[0] is not None and len(readers.get(node.id, ())) == 1:
            key = (node.type, node.config.model_dump_json(), node.inputs[0].node, min(readers[node.id]))
            found[node.id] = first.setdefault(key, node.id)
    return found


def _box(node: GraphNode, nodes: Sequence[NodeId], width: int, frames: Mapping[str, str]) -> Box:
    block = block_of(node.id)
    frame = block if block in frames else None
    name = node.id[len(block) + 1 :] if block is not None and frame is not None else node.id
    times = f"{width} × " if width > 1 else ""
    shape = f" {show(node.output_shapes[0])}" if node.output_shapes and node.output_shapes[0] else ""
    return Box(node.id, f"{name} …" if width > 1 else name, f"{times}{node.type}{shape}", node.type, tuple(nodes), frame)
