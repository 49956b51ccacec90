"""Dropout and random masks; how `base.Philox` goes to the kernels.

Rule: masks are never stored, every kernel that needs one makes it again. One block of Philox serves eight neighbours, so kernels take
eight at a time where the array starts at a multiple of eight of the batch; else one at a time, with the same result.
"""

from __future__ import annotations

import struct

import numpy as np

from dcnr.backends.base import Philox, dropout_scale, dropout_threshold
from dcnr.backends.cupy.array import DeviceArray
from dcnr.backends.cupy.arrays import cast, group
from dcnr.backends.cupy.device import Device, blocks, storage

THREADS = 256
GROUPS = 2
"""That a thread takes."""
NO_MASK = bytes(40)
"""For a kernel that was compiled not to drop anything."""
_LOW = 0xFFFFFFFF


def mask(rng: Philox, rate: float, scale: float | None = None) -> bytes:
    """`struct Mask` of `device.cuh`. `rng.step` is a 0-d device array; what is kept is multiplied by `scale` (by default dropout's)."""
    factor = dropout_scale(rate) if scale is None else scale
    key = rng.seed & _LOW, (rng.seed >> 32) & _LOW
    return struct.pack("<QQ4IfI", rng.step.ptr, rng.offset, rng.stream & _LOW, *key, dropout_threshold(rate), factor, 0)


def mask_group(rng: Philox | None) -> int:
    """How many elements a kernel may take at once for the sake of the mask: 8 or 1."""
    return 1 if rng is not None and rng.offset % 8 else 8


def dropout(device: Device, x: DeviceArray, rate: float, rng: Philox, residual: DeviceArray | None = None) -> DeviceArray:
    """See `Backend.dropout`."""
    return _masked(device, x, mask(rng, rate), mask_group(rng), residual)


def random_mask(device: Device, x: DeviceArray, rate: float, rng: Philox) -> DeviceArray:
    """See `Backend.random_mask`."""
    return _masked(device, x, mask(rng, rate, scale=1.0), mask_group(rng), None)


def _masked(device: Device, x: DeviceArray, packed: bytes, most: int, residual: DeviceArray | None) -> DeviceArray:
    y = device.empty(x.shape, x.dtype)
    if not x.size:
        return y
    if residual is not None:
        residual = cast(device, residual, x.dtype)
    size = min(most, group(x, y, x if residual is None else residual, width=x.size))
    kernel = device.kernel("random", "dropout", storage(x.dtype), f"GROUP={size}")
    groups = x.size // size
    device.launch(kernel, (blocks(groups, THREADS * GROUPS), 1), THREADS, (x, residual, packed, y, np.uint64(groups)))
    return y
