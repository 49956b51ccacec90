"""Activations, alone or behind a product: then they add its bias on the way, and their backward also makes the bias gradient.

Rule: the kernels walk down the rows with fixed columns, `lanes` threads side by side (one tile of columns), so that bias and
column sums stay with a thread.
"""

from __future__ import annotations

from typing import NamedTuple

from dcnr.backends.base import Activation
from dcnr.backends.cupy.array import FLOAT32, DeviceArray
from dcnr.backends.cupy.arrays import cast, group
from dcnr.backends.cupy.columns import no_rows, reduce_columns
from dcnr.backends.cupy.device import Device, blocks, parameter, storage

KINDS: dict[Activation, int] = {"relu": 0, "gelu": 1, "silu": 2, "swiglu": 3}
"""As `activation.cu` numbers them."""
THREADS = 256
"""At most, of a block."""
ROWS = 4
"""That a thread takes in the forward."""
RESIDENT = {2: 6, 4: 4}
"""Blocks of the backward that a multiprocessor holds, by bytes per element; 3 of a gated one."""


class Layout(NamedTuple):
    """How threads are spread over [rows, columns]."""

    rows: int
    columns: int
    size: int
    """Neighbours that a thread takes."""
    tiles: int
    """Of columns."""
    lanes: int
    """Threads side by side in a tile."""
    deep: int
    """Rows a block takes at a time."""


def layout(kind: Activation, x: DeviceArray, size: int) -> Layout:
    """`columns` are those of the result: half of x's if it is gated."""
    wide = x.shape[-1]
    columns = wide // 2 if kind == "swiglu" else wide
    groups = columns // size
    tiles = blocks(groups, THREADS)
    lanes = blocks(groups, tiles)
    return Layout(x.size // wide, columns, size, tiles, lanes, max(1, THREADS // lanes))


def _size(kind: Activation, *arrays: DeviceArray | None) -> int:
    given = [array for array in arrays if array is not None]
    return group(*given, width=min(array.shape[-1] for array in given))


def forward(device: Device, kind: Activation, pre: DeviceArray, bias: DeviceArray | None) -> DeviceArray:
    """activation(pre + bias). pre [..., F], or [..., 2 F] = (value, gate) for swiglu, which halves the last axis."""
    wide = pre.shape[-1]
    y = device.empty((*pre.shape[:-1], wide // 2 if kind == "swiglu" else wide), pre.dtype)
    if not y.size:
        return y
    at = layout(kind, pre, _size(kind, y, pre, bias))
    stored = storage(pre.dtype), parameter(pre.dtype if bias is None else bias.dtype)
    kernel = device.kernel("activation", "activate", *stored, f"GROUP={at.size}", f"KIND={KINDS[kind]}")
    grid = blocks(at.rows, at.deep * ROWS), at.tiles
    device.launch(kernel, grid, at.lanes * at.deep, (pre, bias, y, at.rows, at.columns, at.lanes))
    return y


def backward(
    device: Device, kind: Activation, dy: DeviceArray, pre: DeviceArray, bias: DeviceArray | None,
    into_bias: DeviceArray | None, accumulate: bool,
) -> DeviceArray:  # fmt: skip
    """d(pre), shaped as `pre`; its column sums go to `into_bias`, if there is one."""
    dx = device.empty(pre.shape, dy.dtype)
    pre = cast(device, pre, dy.dtype)
    if not pre.size:
        no_rows(device, (into_bias,), accumulate)
        return dx
    at = layout(kind, pre, _size(kind, dy, pre, dx, bias))
    resident = 3 if kind == "swiglu" else RESIDENT[pre.dtype.itemsize]
    stored = storage(pre.dtype), parameter(pre.dtype if bias is None else bias.dtype)
    sums = int(into_bias is not None)
    defines = f"GROUP={at.size}", f"KIND={KINDS[kind]}", f"SUMS={sums}", f"RESIDENT={resident}"
    kernel = device.kernel("activation", "activate_backward", *stored, *defines)
    count = min(blocks(at.rows, at.deep), blocks(resident * device.multiprocessors, at.tiles))
    part = device.empty((count, pre.shape[-1]), FLOAT32) if sums else None
    device.launch(kernel, (count, at.tiles), at.lanes * at.deep, (dy, pre, bias, dx, part, at.rows, at.columns, at.lanes))
    if part is not None:
        reduce_columns(device, part, (into_bias,), accumulate)
    return dx


def activate(device: Device, kind: Activation, x: DeviceArray) -> DeviceArray:
    """See `Backend.activate`."""
    return forward(device, kind, x, None)


def activate_backward(device: Device, kind: Activation, dy: DeviceArray, x: DeviceArray) -> DeviceArray:
    """See `Backend.activate_backward`."""
    return backward(device, kind, dy, x, None, None, False)
