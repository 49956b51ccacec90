"""Layer normalisation over the last axis (Ba et al. 2016), with gain and optional bias.

R all leading axes, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from dcnr.backends.base import Array
from dcnr.nodes.base import Env, Node, Parameter, Saved, Shape
from dcnr.nodes.linear import plain
from dcnr.nodes.rules import elements, known, last_axis, one
from dcnr.nodes.spec import BuildArgs, Keeps, NodeConfig, NodeType, Size


class LayerNormConfig(NodeConfig):
    """The gain starts at one, the bias at zero; neither decays."""

    dim: Size
    eps: float = Field(default=1e-5, gt=0)
    bias: bool = True


def layernorm_parameters(node: str, config: LayerNormConfig) -> tuple[Parameter, ...]:
    """`weight`, and `bias` if there is one."""
    bias = (plain(node, "bias", (config.dim,), None),) if config.bias else ()
    return (plain(node, "weight", (config.dim,), None, fill=1.0), *bias)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Forward/backward of layer normalisation."""

    parameters: tuple[Parameter, ...]
    eps: float

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """[…, D] → […, D]."""
        (x,) = inputs
        y, mean_R, rstd_R = env.backend.layernorm(x.reshape(-1, x.shape[-1]), env.params["weight"], env.params.get("bias"), self.eps)
        return (y.reshape(x.shape),), (x, mean_R, rstd_R)

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """Gradient of the input; gain and bias gradients go to their accumulators."""
        x, mean_R, rstd_R = saved
        (dy,) = grads
        assert x is not None
        assert dy is not None
        dx = env.backend.layernorm_backward(
            dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]), env.params["weight"], mean_R, rstd_R,
            env.grads["weight"], env.grads.get("bias"), env.accumulate,
        )  # fmt: skip
        return (dx.reshape(x.shape),)


def _shapes(config: LayerNormConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    x = known(inputs[0])
    last_axis(x, config.dim, "dim")
    return (x,)


def _flops(config: LayerNormConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
    return 8 * elements(inputs[0])


def _keeps(config: LayerNormConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> Keeps:
    """Its input; mean and deviation of every row."""
    return Keeps(inputs=(0,), floats=2 * elements(inputs[0][:-1]))


def _build(args: BuildArgs) -> Node:
    return LayerNorm(layernorm_parameters(args.id, args.config), args.config.eps)


LAYERNORM = NodeType(
    name="layernorm", aliases=("layer_norm",), config=LayerNormConfig, inputs=one, outputs=one,
    shapes=_shapes, build=_build, flops=_flops, keeps=_keeps,
    summary="Layer normalisation over the last axis.",
)  # fmt: skip
