"""What the table of node types holds: the shape of one row, and the config keys that every node has."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from dcnr.nodes.base import FeedKind, Node, Shape

StorePrecision = Literal["float32", "float16", "bfloat16"]

_PRECISIONS: dict[str, StorePrecision] = {
    "float32": "float32", "fp32": "float32", "f32": "float32",
    "float16": "float16", "fp16": "float16", "f16": "float16", "half": "float16",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
}  # fmt: skip


def store_precision(name: str) -> StorePrecision:
    """`fp16`, `half`, `float16`, … as the one name used inside. Raises `ValueError` for anything else."""
    found = _PRECISIONS.get(name.strip().lower())
    if found is None:
        raise ValueError(f"'{name}' is not a precision; use float32, float16 or bfloat16")
    return found


def _numbers(value: object) -> object:
    """A single number, or a list written as a string ("[-1, 64]", "3 4"), as a list; anything else as it is."""
    if isinstance(value, int):
        return [value]
    if isinstance(value, str):
        return [piece for piece in re.split(r"[\s,]+", value.strip().strip("[]()")) if piece]
    return value


Size = Annotated[int, Field(ge=1)]
"""A width, count or length."""

IntList = Annotated[tuple[int, ...], BeforeValidator(_numbers)]
"""`[8, 64]`, `"[8, 64]"`, `"8, 64"` or `8`."""


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
    recompute: bool = False
    shared_weight_alias: str | None = None
    tie_weight_alias: str | None = None


def common_keys(config: NodeConfig) -> dict[str, Any]:
    """The keys of `NodeConfig` alone, for a merged node's config."""
    return {key: getattr(config, key) for key in NodeConfig.model_fields}


class ShapeError(ValueError):
    """A shape rule refuses its inputs; the message says what it wants and what it got."""


@dataclass(frozen=True, slots=True)
class BuildArgs:
    """What a builder gets. `members` names the YAML nodes behind `id` (itself, if unfused), for canonical parameter names."""

    id: str
    config: Any
    """Of the row's own config class."""
    input_shapes: tuple[Shape, ...]
    output_shapes: tuple[Shape, ...]
    tied: bool
    """Its weight belongs to another node: `parameters` must not list it, `env.params["weight"]` still holds it."""
    members: tuple[str, ...]


class Keeps(NamedTuple):
    """What a forward of one row holds until its backward, as GPUs run it.

    `inputs` and `outputs` are slots whose tensors it holds on to; several nodes may hold one tensor. `own` numbers, in the precision of
    activations, and `floats`, in float32, nobody else has.
    """

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    own: int = 0
    floats: int = 0


def keeps_nothing(config: Any, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> Keeps:
    """For nodes whose backward needs no more than the gradient."""
    return Keeps()


def keeps_input(config: Any, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> Keeps:
    """For nodes whose backward reads what their forward read."""
    return Keeps(inputs=(0,))


def by_position(config: Any, inputs: tuple[Shape, ...]) -> str | None:
    """For nodes that treat every position of a sequence by itself."""
    return None


def no_cache(config: Any, inputs: tuple[Shape, ...]) -> Shape | None:
    """For nodes that need no earlier position."""
    return None


@dataclass(frozen=True, slots=True)
class NodeType:
    """One row of NODE_TYPES. The callables get a config of the row's own class, which is why it is `Any` here.

    `inputs(config)` is the number of input slots (None: as many as edges come in, at least two), `outputs(config)` of output slots.
    `feeds[slot]` says what the trainer sends into a slot that no edge serves (None: an edge is needed). `shapes(config, input_shapes)`
    gives the output shapes or raises `ShapeError`; an input shape is None where the trainer feeds it.
    `flops(config, input_shapes, output_shapes)` is of one forward of one row, and `keeps` what it leaves for its backward.
    `mixes(config, input_shapes)` says why what it gives for a position needs more than that position and what its cache has of earlier
    ones, None if it does not; `cache` is the shape of that cache, of one row.
    """

    name: str
    aliases: tuple[str, ...]
    config: type[NodeConfig]
    inputs: Callable[[Any], int | None]
    outputs: Callable[[Any], int]
    shapes: Callable[[Any, tuple[Shape | None, ...]], tuple[Shape, ...]]
    build: Callable[[BuildArgs], Node]
    flops: Callable[[Any, tuple[Shape, ...], tuple[Shape, ...]], int]
    feeds: tuple[FeedKind | None, ...] = ()
    keeps: Callable[[Any, tuple[Shape, ...], tuple[Shape, ...]], Keeps] = keeps_nothing
    mixes: Callable[[Any, tuple[Shape, ...]], str | None] = by_position
    cache: Callable[[Any, tuple[Shape, ...]], Shape | None] = no_cache
    text_only: bool = False
    """Works on text (tokenizer, detokenizer): not part of a training step."""
    internal: bool = False
    """Made by a pass; not to be written in a file."""
    summary: str = ""
    """One sentence for the generated table of the documentation."""
