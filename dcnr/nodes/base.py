"""What a node computes, and all that it may see while it does.

Gradient locality: a node gets its parameters, what its own forward saved, and the incoming gradient. It cannot see the graph,
the bus, or another node; `tests/test_architecture.py` holds this folder to it.

A node is stateless: parameters, accumulators and saved arrays are handed in, so one node serves every micro-batch, row shard,
session and backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from dcnr.backends.base import Array, Backend, Philox, Precision, Scalar

Shape = tuple[int, ...]
"""Of one slot, without the batch dimension."""

Saved = tuple[Array | None, ...]
"""What a forward keeps for its backward."""


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """One canonical (unfused) parameter inside a stored array: rows [start, stop) of it, under `<node>.<name>` in checkpoints."""

    node: str
    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """One stored array of a node.

    `parts` cover its rows in order; an unfused plain parameter has one part. `std` is that of the normal it starts from,
    None for the constant `fill`. `decay`: whether AdamW's weight decay applies (matrices only).
    """

    name: str
    shape: Shape
    parts: tuple[ParameterPart, ...]
    std: float | None
    fill: float = 0.0
    decay: bool = True


@dataclass(slots=True)
class Env:
    """What one call of one node on one row shard may use besides its tensors."""

    backend: Backend
    params: Mapping[str, Array]
    """By parameter name, in the node's param precision."""
    grads: Mapping[str, Array]
    """By parameter name: this shard's float32 accumulator. Empty when not training."""
    accumulate: bool
    """False for the first micro-batch of a step: write, do not add."""
    activation: Precision
    """Dtype of inputs (already cast) and outputs."""
    seed: int
    step: Scalar
    first_row: int
    """Index of this shard's first row in the whole batch of the step (all micro-batches)."""
    training: bool
    """Dropout on, gradients wanted."""
    weight: Scalar
    """Costs: 1 / counted targets of the whole step."""
    loss_scale: Scalar
    position: int = 0
    """Of the first row of every sequence; only generation begins elsewhere."""
    cache: Array | None = None
    """Generation: the keys and values of the positions so far, [rows, *NodeType.cache]; None where every position comes at once."""

    @classmethod
    def reading(cls, backend: Backend, params: Mapping[str, Array], activation: Precision) -> Self:
        """For a forward that is no part of training: no dropout, no gradients, no step."""
        return cls(
            backend=backend, params=params, grads={}, accumulate=False, activation=activation, seed=0, step=0, first_row=0,
            training=False, weight=0.0, loss_scale=1.0,
        )  # fmt: skip

    def philox(self, stream: int, x: Array) -> Philox:
        """The mask source for `x` [rows, …] of the node whose id hashes to `stream`."""
        per_row = 1
        for extent in x.shape[1:]:
            per_row *= int(extent)
        return Philox(self.seed, stream, self.step, self.first_row * per_row)


class Node(Protocol):
    """Forward/backward of one VNode. Batch rows come first in every tensor."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The stored arrays, in a fixed order. Tied ones are listed by their owner only."""
        ...

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """(outputs by slot, saved). A cost's only output is its loss: a `Scalar`, `weight` already in it."""
        ...

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """Gradients of the inputs by slot (None for ids and targets). A slot of `grads` is None if nobody used that output.

        Parameter gradients go to `env.grads`. A cost ignores `grads` and starts from `env.loss_scale`.
        """
        ...


FeedKind = Literal["ids", "targets", "text"]
"""What enters an input slot that no edge serves: the trainer's ids [seq] and targets [seq], or a request's text (shape ())."""
