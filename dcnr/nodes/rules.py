"""Pieces that the shape rules and arities of every family share.

A shape has no batch dimension; None stands for a slot that no edge serves. Rules raise `ShapeError` with what they want and what they got.
"""

from __future__ import annotations

import math
from typing import NoReturn

from dcnr.nodes.base import Shape
from dcnr.nodes.spec import NodeConfig, ShapeError


def one(config: NodeConfig) -> int:
    """Arity 1."""
    return 1


def two(config: NodeConfig) -> int:
    """Arity 2."""
    return 2


def many(config: NodeConfig) -> None:
    """As many slots as edges come in."""
    return


def refuse(wanted: str, got: object) -> NoReturn:
    """Raise the `ShapeError` that every rule raises."""
    raise ShapeError(f"wants {wanted}, got {list(got) if isinstance(got, tuple) else got}")


def known(shape: Shape | None, slot: int = 0) -> Shape:
    """The shape of a slot that needs an edge."""
    if shape is None:
        raise ShapeError(f"wants an edge into slot {slot}, got none")
    return shape


def last_axis(shape: Shape, size: int, key: str) -> None:
    """The last axis must have the size that config key `key` says."""
    if not shape or shape[-1] != size:
        refuse(f"a last axis of {size} ({key})", shape)


def sequence(shape: Shape, size: int, key: str, seq_len: int | None) -> None:
    """[seq, size], with seq at most `seq_len`."""
    if len(shape) != 2:
        refuse(f"[seq, {size}] ({key} {size})", shape)
    last_axis(shape, size, key)
    if seq_len is not None and shape[0] > seq_len:
        refuse(f"at most {seq_len} positions (seq_len)", shape)


def axis_of(axis: int, shape: Shape) -> int:
    """`axis` counted from 0 without the batch dimension."""
    if not -len(shape) <= axis < len(shape):
        refuse(f"an input that has axis {axis}", shape)
    return axis % len(shape)


def elements(shape: Shape) -> int:
    """Numbers in one row."""
    return math.prod(shape)


def no_flops(config: NodeConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
    """For nodes that only move data."""
    return 0


def flops_per_element(config: NodeConfig, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
    """For cheap element-wise nodes: one per element read."""
    return sum(elements(shape) for shape in inputs)
