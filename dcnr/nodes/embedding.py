"""Token embedding, with learned, rotary or no positions.

The embedder owns the matrix that tied nodes use. Its input slot takes the trainer's ids, or an edge from a tokenizer.
Positions default to `none` here and to `rope` in attention heads, so that a network of defaults has them exactly once.

B batch rows, T positions, V vocabulary, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from dcnr.backends.base import Array, Rope
from dcnr.nodes.base import Env, Node, Parameter, Saved, Shape
from dcnr.nodes.linear import plain
from dcnr.nodes.rules import elements, one, refuse
from dcnr.nodes.spec import BuildArgs, NodeConfig, NodeType, Size, keeps_input


class EmbedderConfig(NodeConfig):
    """`seq_len` is the longest sequence; `rope` rotates the embedding itself."""

    vocab_size: Size
    dim: Size
    seq_len: Size
    position_encoding: Literal["learned", "rope", "none"] = "none"
    rope_theta: float = Field(default=10000.0, gt=0)
    init_std: float = Field(default=0.02, ge=0)

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if self.position_encoding == "rope" and self.dim % 2:
            raise ValueError(f"position_encoding rope turns pairs, so dim must be even, got {self.dim}")
        return self


@dataclass(frozen=True, slots=True)
class Embedder:
    """Forward/backward of the embedding."""

    parameters: tuple[Parameter, ...]
    rope: Rope | None

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """ids [B, T] → [B, T, D]."""
        (ids_BT,) = inputs
        positions, rope = env.params.get("position_weight"), self.rope
        if env.position:
            positions = None if positions is None else positions[env.position :]
            rope = None if rope is None else rope._replace(first=env.position)
        y_BTD = env.backend.embedding(ids_BT, env.params["weight"], positions, env.activation)
        return (y_BTD if rope is None else env.backend.rotate(y_BTD, rope),), (ids_BT,)

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """Ids have no gradient; the two tables' gradients go to their accumulators."""
        (dy_BTD,) = grads
        if self.rope is not None:
            dy_BTD = env.backend.rotate(dy_BTD, self.rope, backward=True)
        env.backend.embedding_backward(dy_BTD, saved[0], env.grads["weight"], env.grads.get("position_weight"), env.accumulate)
        return (None,)


def _shapes(config: EmbedderConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    ids = inputs[0] if inputs[0] is not None else (config.seq_len,)
    if len(ids) != 1 or ids[0] > config.seq_len:
        refuse(f"ids [seq] with at most {config.seq_len} positions (seq_len)", ids)
    return ((ids[0], config.dim),)


def _flops(config: EmbedderConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
    return elements(outputs[0])


def _build(args: BuildArgs) -> Node:
    config: EmbedderConfig = args.config
    weight = () if args.tied else (plain(args.id, "weight", (config.vocab_size, config.dim), config.init_std),)
    learned = config.position_encoding == "learned"
    positions = (plain(args.id, "position_weight", (config.seq_len, config.dim), config.init_std),) if learned else ()
    return Embedder(weight + positions, Rope(config.rope_theta) if config.position_encoding == "rope" else None)


EMBEDDER = NodeType(
    name="embedder", aliases=("embedding",), config=EmbedderConfig, inputs=one, outputs=one,
    shapes=_shapes, build=_build, flops=_flops, keeps=keeps_input, feeds=("ids",),
    summary="Token embedding: ids [seq] → [seq, dim].",
)  # fmt: skip
