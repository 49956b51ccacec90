"""The end of a step: shards folded, optimizers applied, each in one pass over memory.

Passes go in chunks handed to an inner function as slices: as index loops over whole arrays the same arithmetic is four times slower.
Chunks are fixed and folded in order, so sums do not depend on who runs them. Shape suffixes: S shards, N elements.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dcnr.backends.base import AdamStep, SgdStep
from dcnr.backends.cpu.activation import NOTHING
from dcnr.backends.cpu.casts import LOW_BFLOAT16, LOW_FLOAT16, LOW_NONE, low_kind, to_bfloat16, to_float16
from dcnr.backends.cpu.jit import inner, kernel
from dcnr.backends.cpu.linear import add_flat

Floats = npt.NDArray[Any]
CHUNK = 4096
"""Elements per chunk: the slices of all arrays of an optimizer together stay in the L1 and L2 caches."""
NO_LOW = np.empty(0, np.uint16)


@inner
def add_chunk(into: Floats, x: Floats) -> None:
    for i in range(into.size):
        into[i] += x[i]


@inner
def squares(x: Floats) -> np.float64:
    total = np.float64(0)
    for i in range(x.size):
        total += np.float64(x[i]) * np.float64(x[i])
    return total


@kernel("f8(f4[:,::1])")
def fold_kernel(grads_SN: Floats) -> float:
    """grads[0] += grads[1] += …; returns the sum of squares of the result."""
    total = 0.0
    size = grads_SN.shape[1]
    for lo in range(0, size, CHUNK):
        hi = min(lo + CHUNK, size)
        into = grads_SN[0, lo:hi]
        for s in range(1, grads_SN.shape[0]):
            add_chunk(into, grads_SN[s, lo:hi])
        total += squares(into)
    return total


@inner
def round_chunk(kind: int, w: Floats, low: Floats) -> None:
    bits = w.view(np.uint32)
    if kind == LOW_FLOAT16:
        for i in range(low.size):
            low[i] = to_float16(bits[i])
    elif kind == LOW_BFLOAT16:
        for i in range(low.size):
            low[i] = to_bfloat16(bits[i])


@inner
def adam_chunk(w: Floats, g: Floats, m: Floats, v: Floats, c: Floats) -> None:
    """`c` holds factor, beta1, 1 - beta1, beta2, 1 - beta2, 1 / sqrt(correction2), eps, lr / correction1, 1 - lr * weight_decay."""
    factor, b1, a1, b2, a2, root, eps, rate, decay = c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8]
    for i in range(w.size):
        t = g[i] * factor
        mean = b1 * m[i] + a1 * t
        square = b2 * v[i] + a2 * (t * t)
        m[i] = mean
        v[i] = square
        w[i] = w[i] * decay - rate * mean / (np.sqrt(square) * root + eps)


@kernel("void(f4[::1], f4[::1], f4[::1], f4[::1], f4[::1], i8, u2[::1])")
def adam_kernel(w: Floats, g: Floats, m: Floats, v: Floats, constants: Floats, kind: int, low: Floats) -> None:
    for lo in range(0, w.size, CHUNK):
        hi = min(lo + CHUNK, w.size)
        adam_chunk(w[lo:hi], g[lo:hi], m[lo:hi], v[lo:hi], constants)
        if kind != LOW_NONE:
            round_chunk(kind, w[lo:hi], low[lo:hi])


@inner
def sgd_chunk(w: Floats, g: Floats, m: Floats, c: Floats) -> None:
    """`c` holds factor, momentum, lr, weight_decay; an empty m is no momentum."""
    factor, momentum, lr, decay = c[0], c[1], c[2], c[3]
    if m.size:
        for i in range(w.size):
            speed = momentum * m[i] + g[i] * factor
            m[i] = speed
            w[i] -= lr * (speed + decay * w[i])
    else:
        for i in range(w.size):
            w[i] -= lr * (g[i] * factor + decay * w[i])


@kernel("void(f4[::1], f4[::1], f4[::1], f4[::1], i8, u2[::1])")
def sgd_kernel(w: Floats, g: Floats, m: Floats, constants: Floats, kind: int, low: Floats) -> None:
    for lo in range(0, w.size, CHUNK):
        hi = min(lo + CHUNK, w.size)
        sgd_chunk(w[lo:hi], g[lo:hi], m[lo:hi], constants)
        if kind != LOW_NONE:
            round_chunk(kind, w[lo:hi], low[lo:hi])


def fold_shards(grads_SN: Floats) -> tuple[float, bool]:
    """See `Backend.fold_shards`. Squares of finite float32 cannot overflow a float64, so a finite sum means finite gradients."""
    total = fold_kernel(grads_SN.reshape(grads_SN.shape[0], -1))
    return total, math.isfinite(total)


def add_into(into: Floats, x: Floats) -> None:
    """See `Backend.add_into`."""
    add_flat(into.reshape(-1), x.reshape(-1))


def _low(low: Floats | None) -> tuple[int, Floats]:
    return (LOW_NONE, NO_LOW) if low is None else (low_kind(low.dtype), low.reshape(-1).view(np.uint16))


def adam(step: AdamStep, w: Floats, g: Floats, m: Floats, v: Floats, low: Floats | None) -> None:
    """See `Backend.adam`."""
    constants = np.array(
        (
            step.grad_factor, step.beta1, 1 - step.beta1, step.beta2, 1 - step.beta2, 1 / math.sqrt(step.correction2), step.eps,
            step.lr / step.correction1, 1 - step.lr * step.weight_decay,
        ),
        np.float32,
    )  # fmt: skip
    adam_kernel(w.reshape(-1), g.reshape(-1), m.reshape(-1), v.reshape(-1), constants, *_low(low))


def sgd(step: SgdStep, w: Floats, g: Floats, m: Floats | None, low: Floats | None) -> None:
    """See `Backend.sgd`."""
    constants = np.array((step.grad_factor, step.momentum, step.lr, step.weight_decay), np.float32)
    sgd_kernel(w.reshape(-1), g.reshape(-1), NOTHING if m is None else m.reshape(-1), constants, *_low(low))
