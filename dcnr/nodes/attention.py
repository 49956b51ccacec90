"""Self-attention: one head, several heads, and heads that a pass merged.

All three are one product to q, k and v, softmax attention (which adds the bias of that product), and (`output_projection`) one product
back. The stored `qkv_weight` has the rows of all queries (head after head), then keys, then values; checkpoints hold them apart, as
`q_weight`, `k_weight`, `v_weight` of each head.

B batch rows, T positions, R = B * T, F = 3 * heads * head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import AliasChoices, Field, model_validator

from dcnr.backends.base import Array, Rope
from dcnr.nodes.base import Env, Node, Parameter, ParameterPart, Saved, Shape
from dcnr.nodes.linear import plain
from dcnr.nodes.rules import known, one, sequence
from dcnr.nodes.spec import BuildArgs, Keeps, NodeConfig, NodeType, Size, common_keys


class AttentionKeys(NodeConfig):
    """What one head and many share. `seq_len`, if given, is the longest sequence."""

    input_dim: Size = Field(validation_alias=AliasChoices("input_dim", "dim"))
    seq_len: Size | None = None
    position_encoding: Literal["rope", "none"] = "rope"
    rope_theta: float = Field(default=10000.0, gt=0)
    bias: bool = True
    causal: bool = True
    init_std: float = Field(default=0.02, ge=0)

    @property
    def rope(self) -> Rope | None:
        """How q and k are turned."""
        return Rope(self.rope_theta) if self.position_encoding == "rope" else None

    def check_pairs(self, head_dim: int) -> None:
        """Rotary positions turn neighbouring pairs."""
        if self.position_encoding == "rope" and head_dim % 2:
            raise ValueError(f"position_encoding rope turns pairs, so head_dim must be even, got {head_dim}")


class AttentionHeadConfig(AttentionKeys):
    """One head: [seq, input_dim] → [seq, head_dim]."""

    head_dim: Size

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check_pairs(self.head_dim)
        return self


class AttentionConfig(AttentionKeys):
    """Several heads: [seq, dim] → [seq, num_heads * head_dim], or back to [seq, dim] with `output_projection`."""

    num_heads: Size
    head_dim: Size | None = None
    output_projection: bool = False
    output_init_std: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_dim is None and self.input_dim % self.num_heads:
            raise ValueError(f"dim {self.input_dim} is not a multiple of num_heads {self.num_heads}; give head_dim")
        self.check_pairs(self.width // self.num_heads)
        return self

    @property
    def width(self) -> int:
        """num_heads * head_dim."""
        return self.num_heads * (self.head_dim if self.head_dim is not None else self.input_dim // self.num_heads)


class FusedHeadsConfig(NodeConfig):
    """Heads of one config that read one broadcast and fill one stack, in order."""

    head: AttentionHeadConfig
    heads: Size

    @classmethod
    def fuse(cls, heads: Sequence[AttentionHeadConfig]) -> Self:
        """All of `heads` are equal."""
        return cls(head=heads[0], heads=len(heads), **common_keys(heads[0]))


@dataclass(frozen=True, slots=True)
class Attention:
    """Forward/backward of self-attention."""

    parameters: tuple[Parameter, ...]
    heads: int
    causal: bool
    rope: Rope | None
    projects: bool

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """[B, T, input_dim] → [B, T, heads * head_dim], or back to input_dim."""
        (x_BTI,) = inputs
        rows, length, width = x_BTI.shape
        qkv_RF, _ = env.backend.linear(x_BTI.reshape(-1, width), env.params["qkv_weight"], None)
        qkv_BTF = qkv_RF.reshape(rows, length, -1)
        bias, saved = env.params.get("qkv_bias"), ()
        if env.cache is None:
            o_BTD, saved = env.backend.attention(qkv_BTF, bias, self.heads, self.causal, self.rope)
        else:
            o_BTD = env.backend.attention_cached(qkv_BTF, bias, self.heads, self.rope, env.cache, env.position)
        kept = (x_BTI, o_BTD, *saved)
        if not self.projects:
            return (o_BTD,), kept
        y_RI, _ = env.backend.linear(o_BTD.reshape(rows * length, -1), env.params["out_weight"], env.params.get("out_bias"))
        return (y_RI.reshape(rows, length, -1),), kept

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """Gradient of the input; those of all matrices and biases go to their accumulators."""
        x_BTI, o_BTD, *kept = saved
        (do_BTD,) = grads
        assert x_BTI is not None
        if self.projects:
            do_BTD = _linear_backward(env, "out_weight", "out_bias", do_BTD, o_BTD)
        dqkv_BTF = env.backend.attention_backward(
            do_BTD, o_BTD, env.params.get("qkv_bias"), tuple(kept), self.heads, self.causal, self.rope,
            env.grads.get("qkv_bias"), env.accumulate,
        )  # fmt: skip
        return (_linear_backward(env, "qkv_weight", None, dqkv_BTF, x_BTI),)


def _linear_backward(env: Env, weight: str, bias: str | None, dy: Array, x: Array) -> Array:
    """Backward of a product over the last axis of [B, T, …], whose bias, if any, is `bias`."""
    b_O, into_b = (env.params.get(bias), env.grads.get(bias)) if bias is not None else (None, None)
    dx = env.backend.linear_backward(
        dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]), env.params[weight], b_O, None, None,
        env.grads[weight], into_b, env.accumulate, True,
    )  # fmt: skip
    assert dx is not None
    return dx.reshape(x.shape)


def _qkv_parameters(nodes: Sequence[str], rows: int, config: AttentionKeys) -> tuple[Parameter, ...]:
    """`qkv_weight` and `qkv_bias` of `nodes`, each with `rows` rows of q, of k and of v."""
    places = [(node, letter) for letter in "qkv" for node in nodes]

    def stacked(kind: str, shape: Shape, std: float | None) -> Parameter:
        parts = [ParameterPart(node, f"{letter}_{kind}", i * rows, (i + 1) * rows) for i, (node, letter) in enumerate(places)]
        return Parameter(f"qkv_{kind}", shape, tuple(parts), std, decay=len(shape) > 1)

    weight = stacked("weight", (len(places) * rows, config.input_dim), config.init_std)
    return (weight, stacked("bias", (len(places) * rows,), None)) if config.bias else (weight,)


def _flops(config: AttentionKeys, length: int, width: int) -> int:
    """Products to q, k and v, then scores and weighted sums (half of them if causal)."""
    mixing = 4 * length * length * width
    return 6 * length * config.input_dim * width + (mixing // 2 if config.causal else mixing)


def _keeps(length: int, heads: int, width: int) -> Keeps:
    """Its input; q, k and v; its output; the log-sum-exp of every row and head."""
    return Keeps(inputs=(0,), outputs=(0,), own=3 * length * width, floats=heads * length)


def _looks_ahead(config: AttentionKeys) -> str | None:
    return None if config.causal else "its attention is not causal, so what it says of a position changes with those that follow"


def _head_mixes(config: AttentionHeadConfig, inputs: tuple[Shape, ...]) -> str | None:
    return _looks_ahead(config)


def _head_cache(config: AttentionHeadConfig, inputs: tuple[Shape, ...]) -> Shape:
    return (inputs[0][0], 2 * config.head_dim)


def _mixes(config: AttentionConfig, inputs: tuple[Shape, ...]) -> str | None:
    return _looks_ahead(config)


def _cache(config: AttentionConfig, inputs: tuple[Shape, ...]) -> Shape:
    return (inputs[0][0], 2 * config.width)


def _fused_mixes(config: FusedHeadsConfig, inputs: tuple[Shape, ...]) -> str | None:
    return _looks_ahead(config.head)


def _fused_cache(config: FusedHeadsConfig, inputs: tuple[Shape, ...]) -> Shape:
    return (inputs[0][0], 2 * config.heads * config.head.head_dim)


def _head_shapes(config: AttentionHeadConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    x = known(inputs[0])
    sequence(x, config.input_dim, "input_dim", config.seq_len)
    return ((x[0], config.head_dim),)


def _head_flops(config: AttentionHeadConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
    return _flops(config, inputs[0][0], config.head_dim)


def _head_keeps(config: AttentionHeadConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> Keeps:
    return _keeps(inputs[0][0], 1, config.head_dim)


def _head_build(args: BuildArgs) -> Node:
    config: AttentionHeadConfig = args.config
    return Attention(_qkv_parameters([args.id], config.head_dim, config), 1, config.causal, config.rope, projects=False)


def _shapes(config: AttentionConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    x = known(inputs[0])
    sequence(x, config.input_dim, "dim", config.seq_len)
    return ((x[0], config.input_dim if config.output_projection else config.width),)


def _attention_flops(config: AttentionConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
    length = inputs[0][0]
    projection = 2 * length * config.width * config.input_dim if config.output_projection else 0
    return _flops(config, length, config.width) + projection


def _attention_keeps(config: AttentionConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> Keeps:
    """With a projection, what that reads is not the node's own output."""
    length = inputs[0][0]
    kept = _keeps(length, config.num_heads, config.width)
    return kept._replace(outputs=(), own=kept.own + length * config.width) if config.output_projection else kept


def _build(args: BuildArgs) -> Node:
    config: AttentionConfig = args.config
    parameters = _qkv_parameters([args.id], config.width, config)
    if config.output_projection:
        std = config.init_std if config.output_init_std is None else config.output_init_std
        parameters += (plain(args.id, "out_weight", (config.input_dim, config.width), std),)
        parameters += (plain(args.id, "out_bias", (config.input_dim,), None),) if config.bias else ()
    return Attention(parameters, config.num_heads, config.causal, config.rope, config.output_projection)


def _fused_shapes(config: FusedHeadsConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    ((length, width),) = _head_shapes(config.head, inputs)
    return ((length, config.heads * width),)


def _fused_flops(config: FusedHeadsConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
    return config.heads * _head_flops(config.head, inputs, outputs)


def _fused_keeps(config: FusedHeadsConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> Keeps:
    return _keeps(inputs[0][0], config.heads, config.heads * config.head.head_dim)


def _fused_build(args: BuildArgs) -> Node:
    """`members` are the broadcast, the heads in order, and the stack."""
    config: FusedHeadsConfig = args.config
    parameters = _qkv_parameters(args.members[1:-1], config.head.head_dim, config.head)
    return Attention(parameters, config.heads, config.head.causal, config.head.rope, projects=False)


ATTENTION_HEAD = NodeType(
    name="attention_head", aliases=("singleheadattention",), config=AttentionHeadConfig, inputs=one, outputs=one,
    shapes=_head_shapes, build=_head_build, flops=_head_flops, keeps=_head_keeps, mixes=_head_mixes, cache=_head_cache,
    summary="One head of self-attention: [seq, input_dim] → [seq, head_dim].",
)  # fmt: skip

ATTENTION = NodeType(
    name="attention", aliases=("multiheadattention",), config=AttentionConfig, inputs=one, outputs=one,
    shapes=_shapes, build=_build, flops=_attention_flops, keeps=_attention_keeps, mixes=_mixes, cache=_cache,
    summary="Multi-head self-attention: [seq, dim] → [seq, num_heads * head_dim], or [seq, dim] with output_projection.",
)  # fmt: skip

FUSED_HEADS = NodeType(
    name="fused_heads", aliases=(), config=FusedHeadsConfig, inputs=one, outputs=one,
    shapes=_fused_shapes, build=_fused_build, flops=_fused_flops, keeps=_fused_keeps, mixes=_fused_mixes, cache=_fused_cache,
    internal=True,
    summary="A broadcast, equal heads and a stack, merged into one attention.",
)  # fmt: skip
