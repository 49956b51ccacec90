"""What the table of node types holds: the shape of one row, and the config keys that every node has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from dcnr.nodes.base import FeedKind, Node, Shape

StorePrecision = Literal["float32", "float16", "bfloat16"]


class NodeConfig(BaseModel):
    """Keys that every node understands. Values may be strings ("512"); unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True)

    optimizer: str | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    precision: str | None = None
    param_precision: str | None = None
    activation_precision: str | None = None
    colocate_group: str | None = None
    colocate_policy: Literal["required", "preferred"] = "preferred"
    shared_weight_alias: str | None = None
    tie_weight_alias: str | None = None


class ShapeError(ValueError):
    """A shape rule refuses its inputs; the message says what it wants and what it got."""


@dataclass(frozen=True, slots=True)
class BuildArgs:
    """What a builder gets. `members` names the YAML nodes behind `id` (itself, if unfused), for canonical parameter names."""

    id: str
    config: NodeConfig
    input_shapes: tuple[Shape, ...]
    output_shapes: tuple[Shape, ...]
    tied: bool
    """Its weight belongs to another node: `parameters` must not list it, `env.params["weight"]` still holds it."""
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeType:
    """One row of NODE_TYPES.

    `inputs(config)` is the number of input slots (None: as many as edges come in, at least two), `outputs(config)` of output slots. `feeds[slot]` says what the trainer sends into a
    slot that no edge serves (None: an edge is needed). `shapes(config, input_shapes)` gives the output shapes or raises `ShapeError`;
    an input shape is None where the trainer feeds it. `flops(config, input_shapes, output_shapes)` is of one forward of one row.
    """

    name: str
    aliases: tuple[str, ...]
    config: type[NodeConfig]
    inputs: Callable[[NodeConfig], int | None]
    outputs: Callable[[NodeConfig], int]
    shapes: Callable[[NodeConfig, tuple[Shape | None, ...]], tuple[Shape, ...]]
    build: Callable[[BuildArgs], Node]
    flops: Callable[[NodeConfig, tuple[Shape, ...], tuple[Shape, ...]], int]
    feeds: tuple[FeedKind | None, ...] = ()
    text_only: bool = False
    """Works on text (tokenizer, detokenizer): not part of a training step."""
    internal: bool = False
    """Made by a pass; not to be written in a file."""
    summary: str = ""
    """One sentence for the generated table of the documentation."""
