"""What the floats of a hop look like on their way between PNodes: as they are, or smaller for thin links. Pure.

| codec | takes | a value becomes | bytes of a float32 |
|---|---|---|---|
| `raw` | everything | itself | 4 |
| `fp16` | float32 | the nearest IEEE half; what is too large becomes the largest one (65504) | 2 |
| `int8` | float32, float16, bfloat16 | a whole number from -127 to 127 times the scale of its block: its largest magnitude / 127 | 1.0625 |

- A codec that would not make a dtype smaller leaves it raw, so ids, masks and half-precision tensors under `fp16` are never touched.
- Rounding is to nearest, ties to even, and depends on nothing but the values: a repeated hop has the same bits.
- Infinities and NaNs stay such (under `int8` a block with one becomes all NaN), so that an overflow is still found where it counts.
- `int8`: the last axis does not matter; blocks are `BLOCK` values in memory order, the last one may be shorter. All scales (float32) come
  first, then the numbers. The error of a value is at most half a scale, 0.4 % of the largest one in its block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

import ml_dtypes
import numpy as np

Codec = Literal["raw", "fp16", "int8"]
CODECS: tuple[Codec, ...] = get_args(Codec)
BLOCK = 64
"""Values that share a scale."""

_FLOAT32, _HALF, _BFLOAT16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
_TAKES: Mapping[str, tuple[np.dtype[Any], ...]] = {"raw": (), "fp16": (_FLOAT32,), "int8": (_FLOAT32, _HALF, _BFLOAT16)}
_MOST = 127
_LARGEST_HALF = 65504.0

Array = np.ndarray[Any, np.dtype[Any]]
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def codec_for(wanted: str, dtype: np.dtype[Any]) -> Codec:
    """`wanted` if it makes tensors of `dtype` smaller, else raw."""
    return cast("Codec", wanted) if dtype in _TAKES.get(wanted, ()) else "raw"


def size(codec: Codec, dtype: np.dtype[Any], count: int) -> int:
    """Bytes on the wire of `count` values."""
    match codec:
        case "raw":
            return count * dtype.itemsize
        case "fp16":
            return 2 * count
        case "int8":
            return count + _FLOAT32.itemsize * math.ceil(count / BLOCK)


def encode(codec: Codec, array: Array) -> Bytes:
    """The bytes of `array` on the wire; raw and contiguous ones are not copied."""
    if codec == "raw":
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    flat = np.ascontiguousarray(array).reshape(-1).astype(np.float32, copy=False)
    return _to_half(flat) if codec == "fp16" else _to_int8(flat)


def decode(codec: Codec, data: Bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """What `encode` was given, as near as the codec can. `data` has the length that `size` says."""
    match codec:
        case "raw":
            return data.view(dtype).reshape(shape)
        case "fp16":
            return data.view(_HALF).astype(dtype).reshape(shape)
        case "int8":
            return _from_int8(data, math.prod(shape)).astype(dtype, copy=False).reshape(shape)


def _to_half(flat: np.ndarray[Any, np.dtype[np.float32]]) -> Bytes:
    with np.errstate(over="ignore", invalid="ignore"):
        half = flat.astype(_HALF)
    overflown = np.isinf(half) & np.isfinite(flat)
    if overflown.any():
        half[overflown] = np.copysign(_HALF.type(_LARGEST_HALF), half[overflown])
    return half.view(np.uint8)


def _to_int8(flat: np.ndarray[Any, np.dtype[np.float32]]) -> Bytes:
    count = len(flat)
    blocks = math.ceil(count / BLOCK)
    encoded = np.empty(size("int8", _FLOAT32, count), np.uint8)
    scales, numbers = encoded[: 4 * blocks].view(np.float32), encoded[4 * blocks :].view(np.int8)
    whole = count // BLOCK * BLOCK
    _quantise(flat[:whole].reshape(-1, BLOCK), scales[: count // BLOCK], numbers[:whole].reshape(-1, BLOCK))
    if whole < count:
        _quantise(flat[None, whole:], scales[-1:], numbers[None, whole:])
    return encoded


def _quantise(values: Array, scales: Array, numbers: Array) -> None:
    """Rows of `values` into one scale and one number each."""
    np.max(np.abs(values), axis=1, out=scales, initial=0.0)
    scales /= np.float32(_MOST)
    scales[~np.isfinite(scales)] = np.nan
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        exact = values / scales[:, None]
    exact[~np.isfinite(exact)] = 0.0  # a block of zeros, or one whose scale already says NaN
    numbers[:] = np.clip(np.rint(exact, out=exact), -_MOST, _MOST)


def _from_int8(data: Bytes, count: int) -> Array:
    blocks = math.ceil(count / BLOCK)
    scales, numbers = data[: 4 * blocks].view(np.float32), data[4 * blocks :].view(np.int8)
    values = numbers.astype(np.float32)
    whole = count // BLOCK * BLOCK
    values[:whole].reshape(-1, BLOCK)[:] *= scales[: count // BLOCK, None]
    if whole < count:
        values[whole:] *= scales[-1]
    return values
