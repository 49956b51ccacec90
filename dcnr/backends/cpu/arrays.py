"""Arrays joined, cut, added and masked: NumPy moves memory, kernels do arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dcnr.backends.cpu.casts import copy_of, narrow, wide
from dcnr.backends.cpu.functions import F4
from dcnr.backends.cpu.jit import kernel
from dcnr.backends.cpu.pool import Pool

Array = npt.NDArray[Any]


@kernel("void(f4[::1], f4[::1], f4[::1])")
def add_kernel(a: Array, b: Array, y: Array) -> None:
    """y = a + b; y may be a."""
    for i in range(y.size):
        y[i] = a[i] + b[i]


@kernel("void(f4[:,:,::1], f8, f4[:,:,::1])")
def causal_kernel(x_ZTU: Array, fill: float, y_ZTU: Array) -> None:
    for z in range(x_ZTU.shape[0]):
        for i in range(x_ZTU.shape[1]):
            for j in range(x_ZTU.shape[2]):
                y_ZTU[z, i, j] = x_ZTU[z, i, j] if j <= i else F4(fill)


def concatenate(pool: Pool, parts: Sequence[Array], axis: int) -> Array:
    """See `Backend.concatenate`."""
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    joined = pool.empty(tuple(shape), parts[0].dtype)
    return np.concatenate(parts, axis, out=joined)


def split(pool: Pool, x: Array, sizes: Sequence[int], axis: int) -> tuple[Array, ...]:
    """See `Backend.split`."""
    pieces = []
    start = 0
    for size in sizes:
        cut = [slice(None)] * x.ndim
        cut[axis] = slice(start, start + size)
        pieces.append(copy_of(pool, x[tuple(cut)]))
        start += size
    return tuple(pieces)


def add(pool: Pool, terms: Sequence[Array]) -> Array:
    """See `Backend.add`."""
    first = terms[0]
    if len(terms) == 1:
        return first
    y = pool.empty(first.shape)
    flat = y.reshape(-1)
    add_kernel(wide(pool, first).reshape(-1), wide(pool, terms[1]).reshape(-1), flat)
    for term in terms[2:]:
        add_kernel(flat, wide(pool, term).reshape(-1), flat)
    return narrow(pool, y, first.dtype)


def causal_mask(pool: Pool, x: Array, fill: float) -> Array:
    """See `Backend.causal_mask`."""
    y = pool.empty(x.shape)
    shape = (-1, *x.shape[-2:])
    causal_kernel(wide(pool, x).reshape(shape), fill, y.reshape(shape))
    return narrow(pool, y, x.dtype)
