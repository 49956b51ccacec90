"""Token and position embedding.

Gradients are summed without atomics: rows are sorted by id on the device, then rows of equal ids are added up in order.

Rule: the sort is ours, since a recorded pass and the emulator of the tests run the same launches.
Shape suffixes: B rows, T positions, N = B * T, V vocabulary, D width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dcnr.backends.base import Precision
from dcnr.backends.cupy.array import FLOAT32, UINT32, DeviceArray, Dtype
from dcnr.backends.cupy.arrays import check_ids, group
from dcnr.backends.cupy.device import Device, blocks, storage
from dcnr.backends.dtypes import dtype_of

DIGIT_BITS, DIGITS = 8, 256
SORT_BLOCKS = 128
"""At most: each block of the sort reads the counts of all."""
CHUNK = 32
"""Sorted rows that one warp sums."""


class Sorted(NamedTuple):
    """`keys[i]` is the id of row `rows[i]`; ascending, equal ids in the order of rows. Ids outside of the vocabulary come last, as V."""

    keys_N: DeviceArray
    rows_N: DeviceArray


def embedding(device: Device, ids: DeviceArray, w_VD: DeviceArray, positions_TD: DeviceArray | None, precision: Precision) -> DeviceArray:
    """See `Backend.embedding`. An id outside of the vocabulary gives a row of NaN."""
    check_ids(ids)
    vocabulary, width = w_VD.shape
    y = device.empty((*ids.shape, width), dtype_of(precision))
    if y.size == 0:
        return y
    arrays = [w_VD, y] if positions_TD is None else [w_VD, y, positions_TD]
    defines = (
        storage(y.dtype), _as("TABLE", w_VD.dtype), _as("POSITIONS", w_VD.dtype if positions_TD is None else positions_TD.dtype),
        _aligned(width, *arrays),
    )  # fmt: skip
    lanes = min(32, 1 << (blocks(width, 8) - 1).bit_length())
    device.launch(
        device.kernel("embedding", "embedding", *defines), (blocks(ids.size * lanes, 256), 1), 256,
        (ids, w_VD, positions_TD, y, np.uint64(ids.size), np.uint64(vocabulary), ids.shape[-1], width, lanes),
    )  # fmt: skip
    return y


def embedding_backward(
    device: Device, dy: DeviceArray, ids: DeviceArray, into_w: DeviceArray, into_positions: DeviceArray | None, accumulate: bool
) -> None:
    """See `Backend.embedding_backward`. Ids outside of the vocabulary have no gradient."""
    check_ids(ids)
    if not accumulate:
        device.clear(into_w)
    if dy.size:
        _sum_runs(device, dy.reshape(ids.size, -1), sort(device, ids.reshape(-1), into_w.shape[0]), into_w, accumulate)
    if into_positions is not None:
        _sum_positions(device, dy, into_positions, accumulate)


def sort(device: Device, ids_N: DeviceArray, vocabulary: int) -> Sorted:
    """Sort rows by id: a stable radix sort, `DIGIT_BITS` at a time, in two launches each."""
    n = ids_N.size
    parts = min(SORT_BLOCKS, blocks(n, 256))
    span = blocks(blocks(n, parts), 256) * 256
    grid = blocks(n, span), 1
    now, then = (Sorted(device.empty((n,), UINT32), device.empty((n,), UINT32)) for _ in range(2))
    counts = device.empty((grid[0], DIGITS), UINT32)
    device.launch(device.kernel("embedding", "sort_begin", "STORAGE=1"), (blocks(n, 256), 1), 256, (ids_N, *now, np.uint32(vocabulary), n))
    for shift in range(0, vocabulary.bit_length(), DIGIT_BITS):
        device.launch(device.kernel("embedding", "sort_count", "STORAGE=1"), grid, 256, (now.keys_N, counts, shift, span, n))
        device.launch(device.kernel("embedding", "sort_move", "STORAGE=1"), grid, 256, (*now, counts, *then, shift, span, n))
        now, then = then, now
    return now


def _sum_runs(device: Device, dy_ND: DeviceArray, order: Sorted, into_VD: DeviceArray, accumulate: bool) -> None:
    n, width = dy_ND.shape
    vocabulary = np.uint32(into_VD.shape[0])
    chunks, width8 = blocks(n, CHUNK), blocks(width, 8) * 8
    vectors = 1 if width <= 256 or dy_ND.dtype == FLOAT32 else 2
    part = device.empty((chunks, 2, width8), FLOAT32)
    defines = (storage(dy_ND.dtype), _aligned(width, dy_ND, into_VD), f"VECTORS={vectors}")
    device.launch(
        device.kernel("embedding", "sum_runs", *defines), (blocks(chunks, 8), blocks(width, 256 * vectors)), 256,
        (*order, dy_ND, into_VD, part, vocabulary, n, width, width8, int(accumulate)),
    )  # fmt: skip
    device.launch(
        device.kernel("embedding", "sum_parts", "STORAGE=1"), (chunks, blocks(width, 128)), 128,
        (order.keys_N, into_VD, part, vocabulary, n, width, width8, int(accumulate)),
    )  # fmt: skip


def _sum_positions(device: Device, dy_BTD: DeviceArray, into_TD: DeviceArray, accumulate: bool) -> None:
    """Positions beyond the sequence have no gradient."""
    rows, length = math.prod(dy_BTD.shape[:-2]), dy_BTD.shape[-2]
    used, unused = (into_TD[:length], into_TD[length:]) if dy_BTD.size else (into_TD[:0], into_TD)
    if unused.size and not accumulate:
        device.clear(unused)
    if not used.size:
        return
    defines = (storage(dy_BTD.dtype), _aligned(used.size, dy_BTD, used))
    device.launch(
        device.kernel("embedding", "sum_positions", *defines), (blocks(used.size, 1024), 1), 128,
        (dy_BTD, used, int(accumulate), rows, np.uint64(used.size)),
    )  # fmt: skip


def _as(define: str, dtype: Dtype) -> str:
    return storage(dtype).replace("STORAGE", define)


def _aligned(width: int, *arrays: DeviceArray) -> str:
    """Whether rows consist of whole vectors that lie at 16-byte boundaries."""
    return f"ALIGNED={int(group(*arrays, width=width) == 8)}"
