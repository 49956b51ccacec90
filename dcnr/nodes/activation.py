"""Activations, dropout, and dropout merged with the residual sum after it.

Dropout keeps the same elements in a replay, in any micro-batching and when merged: its mask depends on
(seed, id of the dropout, step, element).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Self

from pydantic import Field

from dcnr.backends.base import Activation, Array
from dcnr.nodes.base import Env, Node, Parameter, Saved, Shape
from dcnr.nodes.rules import elements, flops_per_element, known, last_axis, one, refuse, two
from dcnr.nodes.spec import BuildArgs, NodeConfig, NodeType, Size, common_keys, keeps_input


class ActivationConfig(NodeConfig):
    """`dim`, if given, is checked against the last axis."""

    dim: Size | None = None


class SwigluConfig(NodeConfig):
    """All keys are optional checks: `in_dim` of the input's last axis, `out_dim` of the output's, `dim` of either."""

    dim: Size | None = None
    in_dim: Size | None = None
    out_dim: Size | None = None


class DropoutConfig(NodeConfig):
    """`rate`: the share of elements that become zero in training."""

    rate: float = Field(default=0.1, ge=0, lt=1)


class DropoutAddConfig(NodeConfig):
    """A dropout and the two-input add that alone reads it."""

    dropout: DropoutConfig

    @classmethod
    def fuse(cls, dropout: DropoutConfig) -> Self:
        """Slot 0 takes the dropout's input, slot 1 the add's other term."""
        return cls(dropout=dropout, **common_keys(dropout))


def stream_of(node: str) -> int:
    """The 32-bit hash of a node id that picks its random masks."""
    return zlib.crc32(node.encode())


@dataclass(frozen=True, slots=True)
class Pointwise:
    """Forward/backward of an activation."""

    kind: Activation
    parameters: tuple[Parameter, ...] = ()

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """Same shape, except that swiglu halves the last axis."""
        return (env.backend.activate(self.kind, inputs[0]),), (inputs[0],)

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """Gradient of the input."""
        return (env.backend.activate_backward(self.kind, grads[0], saved[0]),)


@dataclass(frozen=True, slots=True)
class Dropout:
    """Forward/backward of dropout (Srivastava et al. 2014), alone or with a residual in slot 1."""

    rate: float
    stream: int
    adds: bool
    parameters: tuple[Parameter, ...] = ()

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """dropout(x) (+ residual); without training or rate, x (+ residual)."""
        x = inputs[0]
        if env.training and self.rate:
            residual = inputs[1] if self.adds else None
            return (env.backend.dropout(x, self.rate, env.philox(self.stream, x), residual),), ()
        return (env.backend.add(inputs) if self.adds else x,), ()

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """The same mask on the gradient; the residual's gradient is the incoming one."""
        (dy,) = grads
        dx = env.backend.dropout(dy, self.rate, env.philox(self.stream, dy)) if self.rate else dy
        return (dx, dy) if self.adds else (dx,)


def _shapes(config: ActivationConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    x = known(inputs[0])
    if config.dim is not None:
        last_axis(x, config.dim, "dim")
    return (x,)


def _swiglu_shapes(config: SwigluConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    x = known(inputs[0])
    if not x or x[-1] % 2:
        refuse("an even last axis to halve into value and gate", x)
    half = x[-1] // 2
    if config.in_dim not in (None, x[-1]):
        refuse(f"a last axis of {config.in_dim} (in_dim)", x)
    if config.out_dim not in (None, half):
        refuse(f"a last axis of {2 * (config.out_dim or 0)} (twice out_dim)", x)
    if config.dim not in (None, half, x[-1]):
        refuse(f"a last axis of {config.dim} or twice that (dim)", x)
    return ((*x[:-1], half),)


def _same_shape(config: NodeConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    return (known(inputs[0]),)


def _dropout_add_shapes(config: DropoutAddConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    x, residual = known(inputs[0], 0), known(inputs[1], 1)
    if x != residual:
        refuse(f"a residual of shape {list(x)}", residual)
    return (x,)


def _exp_flops(config: NodeConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
    return 8 * elements(inputs[0])


def _build_relu(args: BuildArgs) -> Node:
    return Pointwise("relu")


def _build_gelu(args: BuildArgs) -> Node:
    return Pointwise("gelu")


def _build_silu(args: BuildArgs) -> Node:
    return Pointwise("silu")


def _build_swiglu(args: BuildArgs) -> Node:
    return Pointwise("swiglu")


def _build_dropout(args: BuildArgs) -> Node:
    return Dropout(args.config.rate, stream_of(args.id), adds=False)


def _build_dropout_add(args: BuildArgs) -> Node:
    return Dropout(args.config.dropout.rate, stream_of(args.members[0]), adds=True)


RELU = NodeType(
    name="relu", aliases=(), config=ActivationConfig, inputs=one, outputs=one, shapes=_shapes, build=_build_relu,
    flops=flops_per_element, keeps=keeps_input, summary="max(x, 0).",
)  # fmt: skip
GELU = NodeType(
    name="gelu", aliases=(), config=ActivationConfig, inputs=one, outputs=one, shapes=_shapes, build=_build_gelu,
    flops=_exp_flops, keeps=keeps_input, summary="x times the normal distribution function of x (exact, with erf).",
)  # fmt: skip
SILU = NodeType(
    name="silu", aliases=("swish",), config=ActivationConfig, inputs=one, outputs=one, shapes=_shapes, build=_build_silu,
    flops=_exp_flops, keeps=keeps_input, summary="x * sigmoid(x).",
)  # fmt: skip
SWIGLU = NodeType(
    name="swiglu", aliases=(), config=SwigluConfig, inputs=one, outputs=one, shapes=_swiglu_shapes, build=_build_swiglu,
    flops=_exp_flops, keeps=keeps_input, summary="Splits the last axis into value and gate halves: value * silu(gate).",
)  # fmt: skip
DROPOUT = NodeType(
    name="dropout", aliases=(), config=DropoutConfig, inputs=one, outputs=one, shapes=_same_shape, build=_build_dropout,
    flops=flops_per_element, summary="Zeroes a share `rate` of the elements in training and scales the rest by 1/(1 - rate).",
)  # fmt: skip
DROPOUT_ADD = NodeType(
    name="dropout_add", aliases=(), config=DropoutAddConfig, inputs=two, outputs=one, shapes=_dropout_add_shapes,
    build=_build_dropout_add, flops=flops_per_element, internal=True, summary="A dropout merged with the residual sum after it.",
)  # fmt: skip
