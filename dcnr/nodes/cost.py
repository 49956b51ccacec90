"""Costs, and the LM head that computes its own.

The only output is the loss: a `Scalar` with `env.weight` already in it. The gradient is made in the forward, scaled by
`env.loss_scale`, and handed over in the backward. Arithmetic is float32 at any storage; `cost_precision` float16 or bfloat16
rounds the prediction first.

R all leading axes, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import AliasChoices, BeforeValidator, Field

from dcnr.backends.base import Array
from dcnr.nodes.base import Env, Node, Parameter, Saved, Shape
from dcnr.nodes.linear import Init, LinearConfig, linear_parameters
from dcnr.nodes.rules import elements, known, last_axis, one, refuse, two
from dcnr.nodes.spec import BuildArgs, Keeps, NodeConfig, NodeType, Size, StorePrecision, common_keys, store_precision

CostFunction = Literal["mse", "ce", "ce_logits"]
CostPrecision = Annotated[StorePrecision, BeforeValidator(store_precision)]


class CostConfig(NodeConfig):
    """`ce` takes probabilities, `ce_logits` logits. Slot 1 holds ids; `mse` also takes numbers shaped as the prediction, from an edge."""

    cost_function: CostFunction = "ce_logits"
    vocab_size: Size | None = None
    cost_precision: CostPrecision = "float32"


class LmHeadCostConfig(NodeConfig):
    """A linear layer to the vocabulary and its cross-entropy in one: logits are never held."""

    dim: Size = Field(validation_alias=AliasChoices("dim", "in_dim"))
    vocab_size: Size = Field(validation_alias=AliasChoices("vocab_size", "out_dim"))
    bias: bool = False
    init: Init = "normal"
    init_std: float = Field(default=0.02, ge=0)
    cost_precision: CostPrecision = "float32"

    @property
    def linear(self) -> LinearConfig:
        """The layer in it."""
        return LinearConfig(in_dim=self.dim, out_dim=self.vocab_size, bias=self.bias, init=self.init, init_std=self.init_std)


class FusedLmHeadConfig(NodeConfig):
    """A linear layer, tied or not, and the `ce_logits` cost that alone reads it."""

    linear: LinearConfig
    cost_precision: CostPrecision = "float32"

    @classmethod
    def fuse(cls, linear: LinearConfig, cost: CostConfig) -> Self:
        """`cost.cost_function` is `ce_logits`."""
        return cls(linear=linear, cost_precision=cost.cost_precision, **common_keys(linear))


@dataclass(frozen=True, slots=True)
class Cost:
    """Forward/backward of a cost without parameters."""

    function: CostFunction
    precision: StorePrecision
    parameters: tuple[Parameter, ...] = ()

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """Prediction […, V] and targets (ids […], or numbers […, V] for mse) → loss."""
        x, targets = inputs
        cost = {
            "mse": env.backend.mean_squared_error,
            "ce": env.backend.cross_entropy_of_probabilities,
            "ce_logits": env.backend.cross_entropy,
        }[self.function]
        rounded = _rounded(env, x, self.precision).reshape(-1, x.shape[-1])
        flat = targets.reshape(rounded.shape if targets.ndim == x.ndim else -1)
        loss, dx = cost(rounded, flat, env.weight, env.loss_scale)
        saved: Saved = (env.backend.cast(dx, env.activation).reshape(x.shape),) if env.training else ()
        return (loss,), saved

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """What the forward prepared."""
        return (saved[0], None)


@dataclass(frozen=True, slots=True)
class LmHeadCost:
    """Forward/backward of a linear layer with its cross-entropy.

    Weight gradients are accumulated in the forward, where the tiles of logits exist.
    """

    parameters: tuple[Parameter, ...]
    precision: StorePrecision

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """Hidden […, D] and target ids […] → loss."""
        x, targets = inputs
        x_RD = _rounded(env, x, self.precision).reshape(-1, x.shape[-1])
        loss, dx_RD = env.backend.lm_head_cross_entropy(
            x_RD, env.params["weight"], env.params.get("bias"), targets.reshape(-1), env.weight, env.loss_scale,
            env.grads.get("weight"), env.grads.get("bias"), env.accumulate,
        )  # fmt: skip
        return (loss,), (() if dx_RD is None else (env.backend.cast(dx_RD, env.activation).reshape(x.shape),))

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """What the forward prepared."""
        return (saved[0], None)


def _rounded(env: Env, x: Array, precision: StorePrecision) -> Array:
    return x if precision == "float32" else env.backend.cast(x, precision)


def _shapes(config: CostConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    x, targets = known(inputs[0]), inputs[1]
    if not x:
        refuse("a prediction with at least one axis", x)
    if config.vocab_size is not None:
        last_axis(x, config.vocab_size, "vocab_size")
    allowed = (None, x[:-1], x) if config.cost_function == "mse" else (None, x[:-1])
    if targets not in allowed:
        refuse(f"targets of shape {list(x[:-1])}" + (f" or {list(x)}" if config.cost_function == "mse" else ""), targets)
    return ((),)


def _flops(config: CostConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
    return 8 * elements(inputs[0])


def _keeps(config: NodeConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> Keeps:
    """The gradient of what it reads, which its forward makes."""
    return Keeps(own=elements(inputs[0]))


def _build(args: BuildArgs) -> Node:
    return Cost(args.config.cost_function, args.config.cost_precision)


def _head_shapes(config: LmHeadCostConfig | FusedLmHeadConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    x, targets = known(inputs[0]), inputs[1]
    last_axis(x, config.linear.in_dim, "dim")
    if targets not in (None, x[:-1]):
        refuse(f"targets of shape {list(x[:-1])}", targets)
    return ((),)


def _head_flops(config: LmHeadCostConfig | FusedLmHeadConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
    """The product and the cost; its backward is counted as everywhere, though it runs in the forward."""
    return 2 * elements(inputs[0]) * config.linear.out_dim + 8 * elements(inputs[0][:-1]) * config.linear.out_dim


def _head_build(args: BuildArgs) -> Node:
    """A merged node's parameters belong to its linear member, which is the first; otherwise to the node itself."""
    return LmHeadCost(linear_parameters(args.members[0], args.config.linear, args.tied), args.config.cost_precision)


COST = NodeType(
    name="cost", aliases=(), config=CostConfig, inputs=two, outputs=one, shapes=_shapes, build=_build, flops=_flops, keeps=_keeps,
    feeds=(None, "targets"),
    summary="Mean squared error, or cross-entropy of probabilities or logits, averaged over the targets of the step.",
)  # fmt: skip
TIED_LM_HEAD_CE = NodeType(
    name="tied_lm_head_ce", aliases=("fusedlmheadce",), config=LmHeadCostConfig, inputs=two, outputs=one,
    shapes=_head_shapes, build=_head_build, flops=_head_flops, keeps=_keeps, feeds=(None, "targets"),
    summary="LM head and its cross-entropy in one, with its own or a tied matrix; never holds the logits.",
)  # fmt: skip
FUSED_LM_HEAD = NodeType(
    name="fused_lm_head", aliases=(), config=FusedLmHeadConfig, inputs=two, outputs=one,
    shapes=_head_shapes, build=_head_build, flops=_head_flops, keeps=_keeps, feeds=(None, "targets"), internal=True,
    summary="A linear layer merged with its cross-entropy.",
)  # fmt: skip
