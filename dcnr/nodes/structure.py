"""Nodes that route, cut and join tensors: broadcast, split, stack, add, reshape, mask.

An axis of the config counts without the batch dimension if it is >= 0, from the end if negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import AliasChoices, Field, model_validator

from dcnr.backends.base import Array
from dcnr.errors import InvariantError
from dcnr.nodes.activation import stream_of
from dcnr.nodes.base import Env, Node, Parameter, Saved, Shape
from dcnr.nodes.rules import axis_of, elements, flops_per_element, known, many, no_flops, one, refuse
from dcnr.nodes.spec import BuildArgs, IntList, Keeps, NodeConfig, NodeType, ShapeError, Size


class BroadcastConfig(NodeConfig):
    """`num_outputs` copies of the input, by reference."""

    num_outputs: Size


class SplitConfig(NodeConfig):
    """Either `num_outputs` equal pieces, or pieces of `sizes`."""

    num_outputs: Size | None = None
    sizes: IntList | None = None
    axis: int = -1

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.num_outputs is None) == (self.sizes is None):
            raise ValueError("give either num_outputs or sizes")
        if self.sizes is not None and (not self.sizes or min(self.sizes) < 1):
            raise ValueError(f"sizes must be positive, got {list(self.sizes)}")
        return self

    @property
    def pieces(self) -> int:
        """How many outputs."""
        return len(self.sizes) if self.sizes is not None else self.num_outputs or 0


class StackConfig(NodeConfig):
    """Joins along an axis that exists already; `num_inputs`, if given, is a check."""

    axis: int = -1
    num_inputs: Size | None = None


class AddConfig(NodeConfig):
    """Sum of two or more equal shapes; `num_inputs`, if given, is a check."""

    num_inputs: Size | None = None


class ReshapeConfig(NodeConfig):
    """`shape` without the batch dimension; one extent may be -1."""

    shape: IntList

    @model_validator(mode="after")
    def _one_unknown(self) -> Self:
        if any(extent < 1 and extent != -1 for extent in self.shape) or self.shape.count(-1) > 1:
            raise ValueError(f"shape takes positive extents and at most one -1, got {list(self.shape)}")
        return self


class MaskConfig(NodeConfig):
    """`causal` puts `fill` above the diagonal of the last two axes; `random` zeroes a share `rate` in training, without rescaling."""

    kind: Literal["causal", "random"] = Field(default="causal", validation_alias=AliasChoices("kind", "mask_type"))
    rate: float = Field(default=0.1, ge=0, lt=1)
    fill: float = -1e9


@dataclass(frozen=True, slots=True)
class Broadcast:
    """One tensor for several readers; their gradients are summed in slot order."""

    outputs: int
    parameters: tuple[Parameter, ...] = ()

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """The same array in every slot."""
        return inputs * self.outputs, ()

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """Sum of the gradients of the slots that were used."""
        used = [grad for grad in grads if grad is not None]
        if len(used) > 1:
            return (env.backend.add(used),)
        return (used[0] if used else None,)


@dataclass(frozen=True, slots=True)
class Split:
    """Consecutive pieces along an axis; `axis` counts from the end."""

    sizes: tuple[int, ...]
    axis: int
    parameters: tuple[Parameter, ...] = ()

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """One output a piece."""
        pieces = env.backend.split(inputs[0], self.sizes, self.axis)
        return pieces, (pieces if env.training else ())

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """The pieces' gradients joined; an unused piece has gradient zero."""
        whole = [
            grad if grad is not None else env.backend.zeros(piece.shape, env.activation)
            for piece, grad in zip(saved, grads, strict=True)
            if piece is not None
        ]
        return (env.backend.concatenate(whole, self.axis),)


@dataclass(frozen=True, slots=True)
class Stack:
    """Joins its inputs along an axis; `axis` counts from the end."""

    sizes: tuple[int, ...]
    axis: int
    parameters: tuple[Parameter, ...] = ()

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """One tensor of all inputs in slot order."""
        return (env.backend.concatenate(inputs, self.axis),), ()

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """Each input's piece of the gradient."""
        return env.backend.split(grads[0], self.sizes, self.axis)


@dataclass(frozen=True, slots=True)
class Add:
    """Sum in slot order."""

    terms: int
    parameters: tuple[Parameter, ...] = ()

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """((x0 + x1) + x2) + …"""
        return (env.backend.add(inputs),), ()

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """The same gradient for every term."""
        return grads * self.terms


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same numbers in another shape."""

    before: Shape
    after: Shape
    parameters: tuple[Parameter, ...] = ()

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """[B, *before] → [B, *after]."""
        return (inputs[0].reshape(-1, *self.after),), ()

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """The gradient in the input's shape."""
        dy: Array = grads[0]
        return (dy.reshape(-1, *self.before),)


@dataclass(frozen=True, slots=True)
class CausalMask:
    """Fills what lies above the diagonal."""

    fill: float
    parameters: tuple[Parameter, ...] = ()

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """x[…, i, j] where j <= i, else `fill`."""
        return (env.backend.causal_mask(inputs[0], self.fill),), ()

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """Nothing flows to what was filled."""
        return (env.backend.causal_mask(grads[0], 0.0),)


@dataclass(frozen=True, slots=True)
class RandomMask:
    """Zeroes a share of the elements in training."""

    rate: float
    stream: int
    parameters: tuple[Parameter, ...] = ()

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """keep * x."""
        return (self._mask(env, inputs[0]),), ()

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """The same elements of the gradient."""
        return (self._mask(env, grads[0]),)

    def _mask(self, env: Env, x: Array) -> Array:
        if not env.training or not self.rate:
            return x
        return env.backend.random_mask(x, self.rate, env.philox(self.stream, x))


@dataclass(frozen=True, slots=True)
class LastPosition:
    """What comes after it is of interest for the last position only."""

    width: int
    parameters: tuple[Parameter, ...] = ()

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """[1, T, D] → [1, 1, D]."""
        x_TD = inputs[0].reshape(-1, self.width)
        return (x_TD[x_TD.shape[0] - 1 :].reshape(1, 1, self.width),), ()

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """Only generation has this node."""
        raise InvariantError("last_position takes no part in training")


def _last_shapes(config: NodeConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    return ((1, known(inputs[0])[-1]),)


def _build_last(args: BuildArgs) -> Node:
    return LastPosition(args.input_shapes[0][-1])


def _split_mixes(config: SplitConfig | StackConfig, inputs: tuple[Shape, ...]) -> str | None:
    return "it works along the axis of positions" if axis_of(config.axis, inputs[0]) == 0 else None


def _reshape_mixes(config: ReshapeConfig, inputs: tuple[Shape, ...]) -> str | None:
    return "it gives numbers another shape, in which positions are not told apart"


def _mask_mixes(config: MaskConfig, inputs: tuple[Shape, ...]) -> str | None:
    return "its mask depends on where a number stands in the whole" if config.kind == "causal" else None


def _broadcast_shapes(config: BroadcastConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    return (known(inputs[0]),) * config.num_outputs


def _split_sizes(config: SplitConfig, extent: int, shape: Shape) -> tuple[int, ...]:
    if config.sizes is not None:
        if sum(config.sizes) != extent:
            refuse(f"an axis of {sum(config.sizes)} (the sum of sizes)", shape)
        return config.sizes
    if extent % config.pieces:
        refuse(f"an axis that divides into {config.pieces} equal pieces", shape)
    return (extent // config.pieces,) * config.pieces


def _split_shapes(config: SplitConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    x = known(inputs[0])
    axis = axis_of(config.axis, x)
    return tuple((*x[:axis], size, *x[axis + 1 :]) for size in _split_sizes(config, x[axis], x))


def _check_count(num_inputs: int | None, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    if len(inputs) < 2 or num_inputs not in (None, len(inputs)):
        raise ShapeError(f"wants {num_inputs or 'two or more'} inputs, got {len(inputs)}")
    return tuple(known(shape, slot) for slot, shape in enumerate(inputs))


def _stack_shapes(config: StackConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    shapes = _check_count(config.num_inputs, inputs)
    first = shapes[0]
    axis = axis_of(config.axis, first)
    for shape in shapes:
        if len(shape) != len(first) or (*shape[:axis], *shape[axis + 1 :]) != (*first[:axis], *first[axis + 1 :]):
            refuse(f"inputs that differ from {list(first)} only along axis {axis}", shape)
    return ((*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :]),)


def _add_shapes(config: AddConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    shapes = _check_count(config.num_inputs, inputs)
    for shape in shapes:
        if shape != shapes[0]:
            refuse(f"inputs of one shape {list(shapes[0])}", shape)
    return (shapes[0],)


def _reshape_shapes(config: ReshapeConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    x = known(inputs[0])
    fixed = elements(tuple(extent for extent in config.shape if extent != -1))
    if elements(x) % fixed or (-1 not in config.shape and elements(x) != fixed):
        refuse(f"an input that fits shape {list(config.shape)}", x)
    return (tuple(elements(x) // fixed if extent == -1 else extent for extent in config.shape),)


def _mask_shapes(config: MaskConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    x = known(inputs[0])
    if config.kind == "causal" and len(x) < 2:
        refuse("at least two axes [rows, columns]", x)
    return (x,)


def _from_end(axis: int, shape: Shape) -> int:
    return axis_of(axis, shape) - len(shape)


def _split_keeps(config: SplitConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> Keeps:
    """Its pieces, for their shapes."""
    return Keeps(outputs=tuple(range(len(outputs))))


def _build_broadcast(args: BuildArgs) -> Node:
    return Broadcast(args.config.num_outputs)


def _build_split(args: BuildArgs) -> Node:
    axis = _from_end(args.config.axis, args.input_shapes[0])
    return Split(tuple(shape[axis] for shape in args.output_shapes), axis)


def _build_stack(args: BuildArgs) -> Node:
    axis = _from_end(args.config.axis, args.input_shapes[0])
    return Stack(tuple(shape[axis] for shape in args.input_shapes), axis)


def _build_add(args: BuildArgs) -> Node:
    return Add(len(args.input_shapes))


def _build_reshape(args: BuildArgs) -> Node:
    return Reshape(args.input_shapes[0], args.output_shapes[0])


def _build_mask(args: BuildArgs) -> Node:
    config: MaskConfig = args.config
    return CausalMask(config.fill) if config.kind == "causal" else RandomMask(config.rate, stream_of(args.id))


def _broadcast_outputs(config: BroadcastConfig) -> int:
    return config.num_outputs


def _split_outputs(config: SplitConfig) -> int:
    return config.pieces


BROADCAST = NodeType(
    name="broadcast", aliases=(), config=BroadcastConfig, inputs=one, outputs=_broadcast_outputs,
    shapes=_broadcast_shapes, build=_build_broadcast, flops=no_flops, summary="One input for num_outputs readers.",
)  # fmt: skip
SPLIT = NodeType(
    name="split", aliases=(), config=SplitConfig, inputs=one, outputs=_split_outputs, shapes=_split_shapes,
    build=_build_split, flops=no_flops, keeps=_split_keeps, mixes=_split_mixes,
    summary="Cuts an axis into num_outputs equal pieces, or into sizes.",
)  # fmt: skip
STACK = NodeType(
    name="stack", aliases=("concat", "concatenate"), config=StackConfig, inputs=many, outputs=one, shapes=_stack_shapes,
    build=_build_stack, flops=no_flops, mixes=_split_mixes, summary="Joins its inputs along an axis.",
)  # fmt: skip
ADD = NodeType(
    name="add", aliases=("residual",), config=AddConfig, inputs=many, outputs=one, shapes=_add_shapes,
    build=_build_add, flops=flops_per_element, summary="Sum of two or more inputs (slot 0 the main branch, slot 1 the residual).",
)  # fmt: skip
RESHAPE = NodeType(
    name="reshape", aliases=(), config=ReshapeConfig, inputs=one, outputs=one, shapes=_reshape_shapes,
    build=_build_reshape, flops=no_flops, mixes=_reshape_mixes, summary="Another shape for the same numbers.",
)  # fmt: skip
MASK = NodeType(
    name="mask", aliases=(), config=MaskConfig, inputs=one, outputs=one, shapes=_mask_shapes,
    build=_build_mask, flops=flops_per_element, mixes=_mask_mixes, summary="Causal fill above the diagonal, or random zeroes in training.",
)  # fmt: skip
LAST_POSITION = NodeType(
    name="last_position", aliases=(), config=NodeConfig, inputs=one, outputs=one, shapes=_last_shapes, build=_build_last,
    flops=no_flops, internal=True, summary="The last position of a sequence: what generation needs of it.",
)  # fmt: skip
