"""Token, position and rotary embedding. Shape suffixes: B rows, T positions, N = B * T, V vocabulary, D width."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dcnr.backends.base import Rope
from dcnr.backends.cpu.activation import add_row
from dcnr.backends.cpu.casts import narrow, wide
from dcnr.backends.cpu.functions import F4, copy_row
from dcnr.backends.cpu.jit import inner, kernel
from dcnr.backends.cpu.pool import Pool

Array = npt.NDArray[Any]
NO_MATRIX = np.empty((0, 0), np.float32)


@inner
def turn_row(x: Array, cos: Array, sin: Array, y: Array) -> None:
    for i in range(cos.size):
        a = x[2 * i]
        b = x[2 * i + 1]
        y[2 * i] = a * cos[i] - b * sin[i]
        y[2 * i + 1] = a * sin[i] + b * cos[i]


@kernel("void(f4[:,::1], f4[:,::1], f4[:,::1], i8, f4[:,::1])")
def rotate_kernel(x_RC: Array, cos_TP: Array, sin_TP: Array, heads: int, y_RC: Array) -> None:
    """Turn the first heads * width columns of every row, row r standing at position r % T. Other columns stay; y may be x."""
    positions, pairs = cos_TP.shape
    width = 2 * pairs
    before = np.empty(width, np.float32)  # the compiler must see that reads and writes do not overlap
    for r in range(x_RC.shape[0]):
        t = r % positions
        for h in range(heads):
            copy_row(x_RC[r, h * width : (h + 1) * width], before)
            turn_row(before, cos_TP[t], sin_TP[t], y_RC[r, h * width : (h + 1) * width])


def turns(rope: Rope, positions: int, width: int, backward: bool) -> tuple[Array, Array]:
    """cos and sin [T, width / 2] of the angles (first + t) * theta**(-2i / width), negative for the backward."""
    if not rope.first:
        return _turns(rope.theta, positions, width, backward)
    end = rope.first + positions
    cos, sin = _turns(rope.theta, 1 << (end - 1).bit_length(), width, backward)  # few tables, however far it is
    return cos[rope.first : end], sin[rope.first : end]


@lru_cache(maxsize=64)
def _turns(theta: float, positions: int, width: int, backward: bool) -> tuple[Array, Array]:
    rates = theta ** (-2.0 * np.arange(width // 2) / width)
    angles = np.outer(np.arange(positions), rates)
    sin = -np.sin(angles) if backward else np.sin(angles)
    return np.ascontiguousarray(np.cos(angles), np.float32), np.ascontiguousarray(sin, np.float32)


@kernel("b1(i8[::1], i8, i8)")
def ids_fit(ids: Array, least: int, limit: int) -> bool:
    """Whether all ids are in [least, limit)."""
    fit = True
    for i in range(ids.size):
        fit &= least <= ids[i] < limit
    return fit


@kernel("void(i8[::1], f4[:,::1], f4[:,::1], i8, f4[:,::1])")
def embedding_kernel(ids_N: Array, w_VD: Array, positions_TD: Array, positions: int, y_ND: Array) -> None:
    for n in range(ids_N.size):
        copy_row(w_VD[ids_N[n]], y_ND[n])
        if positions_TD.size:
            add_row(y_ND[n], positions_TD[n % positions])


@kernel("void(f4[:,::1], i8[::1], f4[:,::1], f4[:,::1], i8, b1)")
def embedding_backward_kernel(dy_ND: Array, ids_N: Array, into_w_VD: Array, into_p_TD: Array, positions: int, accumulate: bool) -> None:
    if not accumulate:
        into_w_VD[:] = F4(0)
        into_p_TD[:] = F4(0)
    for n in range(ids_N.size):
        add_row(into_w_VD[ids_N[n]], dy_ND[n])
        if into_p_TD.size:
            add_row(into_p_TD[n % positions], dy_ND[n])


def flat_ids(ids: Array, limit: int, least: int = 0) -> Array:
    """Ids as a vector of int64 in [least, limit); checked, because a kernel reads whatever address an id leads to."""
    flat = np.ascontiguousarray(ids, np.int64).reshape(-1)
    if not flat.flags.writeable:
        flat = flat.copy()
    if not ids_fit(flat, least, limit):
        raise IndexError(f"ids from {int(flat.min())} to {int(flat.max())} do not fit a vocabulary of {limit}")
    return flat


def embedding(pool: Pool, ids_BT: Array, w_VD: Array, positions_TD: Array | None, dtype: np.dtype[Any]) -> Array:
    """See `Backend.embedding`."""
    vocabulary, width = w_VD.shape
    ids_N = flat_ids(ids_BT, vocabulary)
    y = pool.empty((*ids_BT.shape, width))
    table = NO_MATRIX if positions_TD is None else wide(pool, positions_TD)
    if w_VD.dtype.char == "f":
        embedding_kernel(ids_N, wide(pool, w_VD), table, ids_BT.shape[-1], y.reshape(-1, width))
    else:  # widen only the rows in use
        embedding_kernel(np.arange(ids_N.size), wide(pool, w_VD[ids_N]), table, ids_BT.shape[-1], y.reshape(-1, width))
    return narrow(pool, y, dtype)


def embedding_backward(pool: Pool, dy_BTD: Array, ids_BT: Array, into_w: Array, into_positions: Array | None, accumulate: bool) -> None:
    """See `Backend.embedding_backward`."""
    table = NO_MATRIX if into_positions is None else into_positions
    ids_N = flat_ids(ids_BT, into_w.shape[0])
    embedding_backward_kernel(wide(pool, dy_BTD).reshape(ids_N.size, -1), ids_N, into_w, table, ids_BT.shape[-1], accumulate)


def rotate(pool: Pool, x_BTD: Array, rope: Rope, backward: bool) -> Array:
    """See `Backend.rotate`."""
    positions, width = x_BTD.shape[-2:]
    cos, sin = turns(rope, positions, width, backward)
    y = pool.empty(x_BTD.shape)
    rotate_kernel(wide(pool, x_BTD).reshape(-1, width), cos, sin, 1, y.reshape(-1, width))
    return narrow(pool, y, x_BTD.dtype)
