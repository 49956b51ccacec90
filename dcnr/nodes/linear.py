"""Linear layers, alone or with the activation that follows them.

y = x w^T + b over the last axis. Weights are [out, in]. A tied layer uses another node's matrix as its weight and keeps its own bias.

B batch rows, R all leading axes, I inputs, O outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field

from dcnr.backends.base import Activation, Array
from dcnr.nodes.base import Env, Node, Parameter, ParameterPart, Saved, Shape
from dcnr.nodes.rules import elements, known, last_axis, one
from dcnr.nodes.spec import BuildArgs, Keeps, NodeConfig, NodeType, ShapeError, Size, common_keys, keeps_input

Init = Literal["normal", "xavier", "kaiming", "zeros"]


class LinearConfig(NodeConfig):
    """`init_std` is for `normal`; xavier is Glorot & Bengio 2010, kaiming He et al. 2015, both as normals."""

    in_dim: Size
    out_dim: Size
    bias: bool = True
    init: Init = "normal"
    init_std: float = Field(default=0.02, ge=0)


class LinearActivationConfig(NodeConfig):
    """A linear layer and the activation that alone reads it."""

    linear: LinearConfig
    activation: Activation

    @classmethod
    def fuse(cls, linear: LinearConfig, activation: Activation) -> Self:
        """`activation` is the canonical type name of the second member."""
        return cls(linear=linear, activation=activation, **common_keys(linear))


def plain(node: str, name: str, shape: Shape, std: float | None, fill: float = 0.0) -> Parameter:
    """A parameter stored as it is in checkpoints. Matrices decay, vectors do not."""
    return Parameter(name, shape, (ParameterPart(node, name, 0, shape[0]),), std, fill, decay=len(shape) > 1)


def linear_parameters(node: str, config: LinearConfig, tied: bool) -> tuple[Parameter, ...]:
    """`weight` unless tied, and `bias` if there is one."""
    weight = () if tied else (plain(node, "weight", (config.out_dim, config.in_dim), _std(config)),)
    bias = (plain(node, "bias", (config.out_dim,), None),) if config.bias else ()
    return weight + bias


def _std(config: LinearConfig) -> float | None:
    match config.init:
        case "normal":
            return config.init_std
        case "xavier":
            return math.sqrt(2 / (config.in_dim + config.out_dim))
        case "kaiming":
            return math.sqrt(2 / config.in_dim)
        case "zeros":
            return None


@dataclass(frozen=True, slots=True)
class Linear:
    """Forward/backward of a linear layer with an optional activation."""

    parameters: tuple[Parameter, ...]
    activation: Activation | None = None

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """[…, I] → […, O] (swiglu: O/2)."""
        (x,) = inputs
        x_RI = x.reshape(-1, x.shape[-1])
        y, pre = env.backend.linear(x_RI, env.params["weight"], env.params.get("bias"), self.activation)
        return (y.reshape(*x.shape[:-1], y.shape[-1]),), (x, pre)

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """Gradient of the input; weight and bias gradients go to their accumulators."""
        x, pre = saved
        (dy,) = grads
        assert x is not None
        assert dy is not None
        dx = env.backend.linear_backward(
            dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]), env.params["weight"], env.params.get("bias"), pre, self.activation,
            env.grads["weight"], env.grads.get("bias"), env.accumulate, True,
        )  # fmt: skip
        assert dx is not None
        return (dx.reshape(x.shape),)


def _shapes(config: LinearConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    x = known(inputs[0])
    last_axis(x, config.in_dim, "in_dim")
    return ((*x[:-1], config.out_dim),)


def _flops(config: LinearConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
    return 2 * elements(inputs[0]) * config.out_dim


def _build(args: BuildArgs) -> Node:
    return Linear(linear_parameters(args.id, args.config, args.tied))


def _fused_shapes(config: LinearActivationConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    (y,) = _shapes(config.linear, inputs)
    if config.activation != "swiglu":
        return (y,)
    if y[-1] % 2:
        raise ShapeError(f"wants an even last axis to halve, got {list(y)}")
    return ((*y[:-1], y[-1] // 2),)


def _fused_flops(config: LinearActivationConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
    return _flops(config.linear, inputs, outputs) + elements(outputs[0])


def _fused_keeps(config: LinearActivationConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> Keeps:
    """Its input, and what the activation read."""
    return Keeps(inputs=(0,), own=elements(inputs[0][:-1]) * config.linear.out_dim)


def _fused_build(args: BuildArgs) -> Node:
    return Linear(linear_parameters(args.members[0], args.config.linear, args.tied), args.config.activation)


LINEAR = NodeType(
    name="linear", aliases=("dense",), config=LinearConfig, inputs=one, outputs=one, shapes=_shapes, build=_build, flops=_flops,
    keeps=keeps_input,
    summary="Linear layer over the last axis: in_dim → out_dim.",
)  # fmt: skip

LINEAR_ACTIVATION = NodeType(
    name="linear_activation", aliases=(), config=LinearActivationConfig, inputs=one, outputs=one,
    shapes=_fused_shapes, build=_fused_build, flops=_fused_flops, keeps=_fused_keeps, internal=True,
    summary="A linear layer merged with its activation.",
)  # fmt: skip
