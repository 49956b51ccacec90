"""Arrays made, cast, joined, cut, added and masked; numbers that change from step to step.

Rule: a cast goes through float32, which holds every 16-bit number exactly, so it rounds once.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np

from dcnr.backends.base import HostArray
from dcnr.backends.cupy.array import FLOAT32, INT64, UINT8, UINT32, DeviceArray, Dtype
from dcnr.backends.cupy.columns import no_rows, reduce_columns
from dcnr.backends.cupy.device import Device, blocks, storage
from dcnr.errors import InvariantError

THREADS = 256
MOST_TERMS = 8
"""That one launch adds."""
MOST_WORDS = 16
"""That one launch sets."""
ROWS_PER_BLOCK = 64
"""At least, of partial sums over rows."""


def group(*arrays: DeviceArray, width: int = 8) -> int:
    """Neighbours that a kernel takes at once: 8 if all arrays start at 16-byte boundaries and `width` is a multiple, else 1."""
    return 8 if width % 8 == 0 and all(array.ptr % 16 == 0 for array in arrays) else 1


def from_host(device: Device, x: HostArray, dtype: Dtype | None) -> DeviceArray:
    """Integers become int64; floats are rounded on the device to `dtype`, or kept (float64 as float32)."""
    if x.dtype.kind in "iu":
        return uploaded(device, x.astype(INT64, copy=False))
    y = uploaded(device, x.astype(FLOAT32) if x.dtype.itemsize > 4 else x)
    return y if dtype is None else cast(device, y, dtype)


def uploaded(device: Device, x: HostArray) -> DeviceArray:
    """A copy, of the same dtype."""
    y = device.empty(x.shape, x.dtype)
    device.upload(y, x)
    return y


def check_ids(ids: DeviceArray) -> None:
    """Kernels read ids as int64, whatever they are. Raises `InvariantError` if they are something else."""
    if ids.dtype != INT64:
        raise InvariantError(f"ids of {ids.dtype} where only int64 can be")


def to_host(device: Device, x: DeviceArray) -> HostArray:
    """Waits until it is there."""
    return device.fetch([x]).wait()[0]


def zeros(device: Device, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
    """All bytes zero."""
    x = device.empty(shape, dtype)
    device.clear(x)
    return x


def cast(device: Device, x: DeviceArray, dtype: Dtype) -> DeviceArray:
    """See `Backend.cast`."""
    if x.dtype == dtype:
        return x
    y = device.empty(x.shape, dtype)
    copy_into(device, y, x)
    return y


def copy_into(device: Device, into: DeviceArray, x: DeviceArray) -> None:
    """See `Backend.copy_into`."""
    if into.size != x.size:
        raise InvariantError(f"an array of shape {x.shape} does not fit into {into.shape}")
    if into.dtype == x.dtype:
        device.copy(into, x)
    elif x.dtype == INT64:
        _one_each(device, "from_integers", storage(into.dtype), x, into)
    elif into.dtype == FLOAT32:
        _one_each(device, "widen", storage(x.dtype), x, into)
    else:
        _one_each(device, "narrow", storage(into.dtype), cast(device, x, FLOAT32), into)


def _one_each(device: Device, name: str, stored: str, first: DeviceArray, second: DeviceArray) -> None:
    """A kernel of two arrays of one size."""
    if not first.size:
        return
    size = 1 if name == "from_integers" else group(first, second)
    kernel = device.kernel("arrays", name, stored, f"GROUP={size}")
    device.launch(kernel, (blocks(first.size, THREADS * size), 1), THREADS, (first, second, np.uint64(first.size)))


def concatenate(device: Device, parts: Sequence[DeviceArray], axis: int) -> DeviceArray:
    """See `Backend.concatenate`."""
    axis %= parts[0].ndim
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    joined = device.empty(tuple(shape), parts[0].dtype)
    start = 0
    for part in parts:
        _move(device, part, joined, axis, 0, start)
        start += part.shape[axis]
    return joined


def split(device: Device, x: DeviceArray, sizes: Sequence[int], axis: int) -> tuple[DeviceArray, ...]:
    """See `Backend.split`."""
    axis %= x.ndim
    pieces = []
    start = 0
    for size in sizes:
        piece = device.empty((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype)
        _move(device, x, piece, axis, start, 0)
        pieces.append(piece)
        start += size
    return tuple(pieces)


def _move(device: Device, source: DeviceArray, into: DeviceArray, axis: int, first_from: int, first_to: int) -> None:
    """Entries along `axis`, as many as the smaller array has: from `first_from` of `source` to `first_to` of `into`."""
    rows = math.prod(source.shape[:axis])
    entry = math.prod(source.shape[axis + 1 :]) * source.dtype.itemsize
    width = min(source.shape[axis], into.shape[axis]) * entry
    if not rows * width:
        return
    pitches = source.shape[axis] * entry, into.shape[axis] * entry
    places = source.ptr + first_from * entry, into.ptr + first_to * entry
    odd = width | pitches[0] | pitches[1] | places[0] | places[1]
    unit = min(16, odd & -odd)
    lanes = min(THREADS, 1 << (width // unit - 1).bit_length())
    ends = [_bytes_at(array, place) for array, place in zip((source, into), places, strict=True)]
    device.launch(
        device.kernel("moves", "move_rows", f"UNIT={unit}"), (blocks(rows, THREADS // lanes), 1), THREADS,
        (*ends, np.uint64(rows), np.uint64(width // unit), np.uint64(pitches[0] // unit), np.uint64(pitches[1] // unit), lanes),
    )  # fmt: skip


def _bytes_at(array: DeviceArray, place: int) -> DeviceArray:
    """The rest of `array` from an address on."""
    return DeviceArray(place, (array.ptr + array.nbytes - place,), UINT8, array.owner)


def add(device: Device, terms: Sequence[DeviceArray]) -> DeviceArray:
    """See `Backend.add`."""
    first = terms[0]
    if len(terms) == 1 or not first.size:
        return first
    if len(terms) > MOST_TERMS or any(term.dtype != first.dtype for term in terms):
        return _add_one_by_one(device, terms)
    y = device.empty(first.shape, first.dtype)
    size = group(y, *terms)
    kernel = device.kernel("arrays", "add_terms", storage(first.dtype), f"GROUP={size}", f"TERMS={len(terms)}")
    packed = struct.pack(f"{len(terms)}Q", *(term.ptr for term in terms))
    device.launch(kernel, (blocks(y.size, THREADS * size), 1), THREADS, (packed, y, np.uint64(y.size)))
    return y


def _add_one_by_one(device: Device, terms: Sequence[DeviceArray]) -> DeviceArray:
    """The same sum with a float32 array in between."""
    total = device.empty(terms[0].shape, FLOAT32)
    copy_into(device, total, terms[0])
    for term in terms[1:]:
        add_into(device, total, term)
    return cast(device, total, terms[0].dtype)


def add_into(device: Device, into: DeviceArray, x: DeviceArray) -> None:
    """See `Backend.add_into`."""
    if into.size:
        size = group(into, x)
        kernel = device.kernel("arrays", "add_into", storage(x.dtype), f"GROUP={size}")
        device.launch(kernel, (blocks(into.size, THREADS * size), 1), THREADS, (into, x, np.uint64(into.size)))


def column_sums(device: Device, x: DeviceArray, into: DeviceArray, accumulate: bool) -> None:
    """into [C] (+)= sums over all other axes of `x`; partial sums of consecutive rows, then their sum, in fixed order."""
    columns = into.size
    rows = x.size // columns if columns else 0
    if not rows:
        no_rows(device, (into,), accumulate)
        return
    size = group(x, width=columns)
    wide = blocks(columns, 32 * size)
    count = min(blocks(rows, ROWS_PER_BLOCK), max(1, 4 * device.multiprocessors // wide))
    per_block = -(-rows // count)
    count = -(-rows // per_block)
    part = device.empty((count, columns), FLOAT32)
    kernel = device.kernel("arrays", "column_partials", storage(x.dtype), f"GROUP={size}")
    device.launch(kernel, (wide, count), THREADS, (x, part, np.uint64(rows), columns, np.uint64(per_block)))
    reduce_columns(device, part, (into,), accumulate)


def causal_mask(device: Device, x: DeviceArray, fill: float) -> DeviceArray:
    """See `Backend.causal_mask`."""
    y = device.empty(x.shape, x.dtype)
    if x.size:
        height, width = x.shape[-2:]
        kernel = device.kernel("arrays", "causal_mask", storage(x.dtype), f"GROUP={group(x, width=width)}")
        device.launch(kernel, (x.size // width, 1), 128, (x, y, height, width, fill))
    return y


def scalar(device: Device, value: float) -> DeviceArray:
    """See `Backend.scalar`."""
    x = device.empty((), UINT32 if isinstance(value, int) else FLOAT32)
    set_scalars(device, [x], [value])
    return x


def set_scalars(device: Device, scalars: Sequence[DeviceArray], values: Sequence[float]) -> None:
    """The numbers travel with the launch: nothing is copied, nothing waits."""
    for start in range(0, len(scalars), MOST_WORDS):
        some = scalars[start : start + MOST_WORDS]
        words = [_word(x.dtype, value) for x, value in zip(some, values[start : start + MOST_WORDS], strict=True)]
        missing = [0] * (MOST_WORDS - len(some))
        packed = struct.pack(f"{MOST_WORDS}Q{MOST_WORDS}I", *(x.ptr for x in some), *missing, *words, *missing)
        device.launch(device.kernel("moves", "set_words"), (1, 1), 32, (packed, len(some)))


def _word(dtype: Dtype, value: float) -> int:
    """The 32 bits of a number."""
    if dtype == UINT32:
        return int(value) & 0xFFFFFFFF
    return int(np.float32(value).view(UINT32))
