"""How 16-bit storage meets float32 arithmetic: widen, compute, round once.

Overflow is no error here: an infinite gradient is how loss scaling learns that its scale is too high. So operations run under `quiet`.
"""

from __future__ import annotations

import numpy as np

from dcnr.backends.base import HostArray

quiet = np.errstate(all="ignore")
"""Decorates an operation whose overflow, or NaN, is a result like any other."""


def wide(x: HostArray) -> HostArray:
    """`x` in float32; float64 stays, for finite differences."""
    return x if x.dtype in (np.float32, np.float64) else x.astype(np.float32)


def like(y: HostArray, x: HostArray) -> HostArray:
    """`y` rounded to the dtype of `x`."""
    return y.astype(x.dtype, copy=False)


def write(into: HostArray, value: HostArray, accumulate: bool) -> None:
    """Write to a gradient accumulator, or add to it."""
    if accumulate:
        into += value
    else:
        into[...] = value
