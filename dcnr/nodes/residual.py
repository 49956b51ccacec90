"""The end of one part of a residual network and the beginning of the next, as one node: a branch joins its residual, and is normalised.

branch = dropout(x w^T + b) or dropout(x); sum = residual + branch; y = layernorm(sum). Slot 0 takes x, slot 1 the residual.
Output 0 is y, output 1 the sum, for whoever adds to it next.

I inputs of the linear layer, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from dcnr.backends.base import Array, Philox
from dcnr.nodes.activation import DropoutConfig, stream_of
from dcnr.nodes.base import Env, Node, Parameter, Saved, Shape
from dcnr.nodes.linear import LinearConfig, linear_parameters
from dcnr.nodes.norm import LayerNormConfig, layernorm_parameters
from dcnr.nodes.rules import elements, known, last_axis, refuse, two
from dcnr.nodes.spec import BuildArgs, Keeps, NodeConfig, NodeType, common_keys


class ResidualNormConfig(NodeConfig):
    """The members that compute; the sum itself has no keys."""

    linear: LinearConfig | None
    dropout: DropoutConfig | None
    norm: LayerNormConfig

    @classmethod
    def fuse(cls, linear: LinearConfig | None, dropout: DropoutConfig | None, norm: LayerNormConfig) -> Self:
        """`linear` and `norm` have the same keys for the optimizer."""
        keys = common_keys(norm)
        if linear is not None:
            keys |= {"shared_weight_alias": linear.shared_weight_alias, "tie_weight_alias": linear.tie_weight_alias}
        return cls(linear=linear, dropout=dropout, norm=norm, **keys)


@dataclass(frozen=True, slots=True)
class ResidualNorm:
    """Forward/backward of both. The bias of the linear layer is added where the sum is made."""

    parameters: tuple[Parameter, ...]
    has_linear: bool
    rate: float
    stream: int
    eps: float

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """([…, D], […, D]) of […, I] and the residual […, D]."""
        x, residual = inputs
        width = residual.shape[-1]
        branch_RD = x.reshape(-1, x.shape[-1])
        if self.has_linear:
            branch_RD, _ = env.backend.linear(branch_RD, env.params["weight"], None)
        sum_RD, y_RD, mean_R, rstd_R = env.backend.residual_norm(
            branch_RD, env.params.get("bias"), residual.reshape(-1, width), self.rate, self._rng(env, residual),
            env.params["norm_weight"], env.params.get("norm_bias"), self.eps,
        )  # fmt: skip
        total = sum_RD.reshape(residual.shape)
        return (y_RD.reshape(residual.shape), total), (x if self.has_linear else None, total, mean_R, rstd_R)

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """Gradients of x and of the residual; those of all parameters go to their accumulators."""
        x, total, mean_R, rstd_R = saved
        dy, dsum = grads
        assert total is not None
        if dy is None:
            dy = env.backend.zeros(total.shape, env.activation)
        width = total.shape[-1]
        dx_RD, dresidual_RD = env.backend.residual_norm_backward(
            dy.reshape(-1, width), None if dsum is None else dsum.reshape(-1, width), total.reshape(-1, width),
            self.rate, self._rng(env, total), env.params["norm_weight"], mean_R, rstd_R,
            env.grads.get("bias"), env.grads["norm_weight"], env.grads.get("norm_bias"), env.accumulate,
        )  # fmt: skip
        dresidual = dresidual_RD.reshape(total.shape)
        if x is None:
            return (dx_RD.reshape(total.shape), dresidual)
        dx = env.backend.linear_backward(
            dx_RD, x.reshape(-1, x.shape[-1]), env.params["weight"], None, None, None, env.grads["weight"], None, env.accumulate, True
        )
        assert dx is not None
        return (dx.reshape(x.shape), dresidual)

    def _rng(self, env: Env, x: Array) -> Philox | None:
        return env.philox(self.stream, x) if env.training and self.rate else None


def _shapes(config: ResidualNormConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    x, residual = known(inputs[0], 0), known(inputs[1], 1)
    if config.linear is not None:
        last_axis(x, config.linear.in_dim, "in_dim")
        x = (*x[:-1], config.linear.out_dim)
    if x != residual:
        refuse(f"a residual of shape {list(x)}", residual)
    last_axis(residual, config.norm.dim, "dim")
    return (residual, residual)


def _flops(config: ResidualNormConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
    product = 2 * elements(inputs[0]) * config.linear.out_dim if config.linear is not None else 0
    return product + 10 * elements(outputs[0])


def _keeps(config: ResidualNormConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> Keeps:
    """The input of its product, and the sum with its means and deviations."""
    return Keeps(inputs=(0,) if config.linear is not None else (), outputs=(1,), floats=2 * elements(outputs[1][:-1]))


def _build(args: BuildArgs) -> Node:
    """`members` are the linear layer and the dropout, if any, the add, a broadcast, if any, and the norm."""
    config: ResidualNormConfig = args.config
    linear = () if config.linear is None else linear_parameters(args.members[0], config.linear, args.tied)
    norm = tuple(replace(one, name=f"norm_{one.name}") for one in layernorm_parameters(args.members[-1], config.norm))
    dropout = args.members[0 if config.linear is None else 1]
    rate = 0.0 if config.dropout is None else config.dropout.rate
    return ResidualNorm(linear + norm, config.linear is not None, rate, stream_of(dropout), config.norm.eps)


def _outputs(config: ResidualNormConfig) -> int:
    return 2


RESIDUAL_NORM = NodeType(
    name="residual_norm", aliases=(), config=ResidualNormConfig, inputs=two, outputs=_outputs, shapes=_shapes, build=_build,
    flops=_flops, keeps=_keeps, internal=True,
    summary="A residual sum merged with the linear layer and dropout before it and the layer normalisation after it.",
)  # fmt: skip
