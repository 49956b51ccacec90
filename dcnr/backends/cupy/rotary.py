"""Rotary embedding on its own. Attention turns its queries and keys itself."""

from __future__ import annotations

import math

import numpy as np

from dcnr.backends.base import Rope
from dcnr.backends.cupy.array import DeviceArray
from dcnr.backends.cupy.arrays import group
from dcnr.backends.cupy.device import Device, blocks, storage

THREADS = 256
BATCH_SHARES = 64
"""At most: a thread finds its angles once and turns its share of the batch by them."""


def rotate(device: Device, x_BTD: DeviceArray, rope: Rope, backward: bool = False) -> DeviceArray:
    """See `Backend.rotate`; axes before the last two are all batch."""
    y = device.empty(x_BTD.shape, x_BTD.dtype)
    if not x_BTD.size:
        return y
    length, width = x_BTD.shape[-2:]
    batch = x_BTD.size // (length * width)
    size = group(x_BTD, y, width=width)
    kernel = device.kernel("rotary", "rotate", storage(x_BTD.dtype), f"GROUP={size}")
    grid = blocks(length * width, THREADS * max(size, 2)), min(batch, BATCH_SHARES)
    sign = -1.0 if backward else 1.0
    device.launch(kernel, grid, THREADS, (x_BTD, y, batch, length, width, np.float64(math.log2(rope.theta)), sign, rope.first))
    return y
