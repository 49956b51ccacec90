"""Descriptors of the Tensor Memory Accelerator (Hopper), as the driver encodes them: 128 bytes that kernels take by value."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from types import MappingProxyType

from dcnr.errors import InvariantError

SIZE = 128
ALIGNMENT = 64

# names and numbers of cuda.h
DATA_TYPES: Mapping[str, int] = MappingProxyType({"float16": 6, "float32": 7, "bfloat16": 9})
INTERLEAVE_NONE, SWIZZLE_128B, L2_PROMOTION_256B, FILL_ZEROS = 0, 3, 3, 0


@functools.lru_cache(maxsize=4096)
def encode(address: int, dtype: str, dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> bytes:
    """See `Device.tensor_map`. Raises `InvariantError` for a tensor that the hardware does not take."""
    rank = len(dims)
    room = ctypes.create_string_buffer(SIZE + ALIGNMENT)
    start = -(-ctypes.addressof(room) // ALIGNMENT) * ALIGNMENT
    longs, words = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(start), DATA_TYPES[dtype], rank, ctypes.c_void_p(address),
        longs(*dims), longs(*strides), words(*box), words(*([1] * rank)),
        INTERLEAVE_NONE, SWIZZLE_128B, L2_PROMOTION_256B, FILL_ZEROS,
    )  # fmt: skip
    if status:
        where = f"{dtype} {dims} at {address:#x}, strides {strides}, boxes of {box}"
        raise InvariantError(f"no tensor map (status {status}) for {where}")
    return ctypes.string_at(start, SIZE)


@functools.cache
def _driver() -> ctypes.CDLL:
    """It is there wherever there is a GPU to make tensor maps for."""
    return ctypes.CDLL("libcuda.so.1")
