"""Random masks: Philox 4x32-10 (Salmon et al. 2011) in the element order that `backends.base.Philox` lays down.

64 neighbouring elements come from 16 blocks, so a vector unit works on blocks side by side and writes
four runs of 16 words. Masks are made and used 1024 elements at a time and never stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dcnr.backends.base import Philox
from dcnr.backends.cpu.activation import NOTHING
from dcnr.backends.cpu.casts import narrow, wide
from dcnr.backends.cpu.functions import F4
from dcnr.backends.cpu.jit import exact, inner, kernel
from dcnr.backends.cpu.pool import Pool

Array = npt.NDArray[Any]
U4 = np.uint32
U8 = np.uint64
GROUPS = 16
"""Groups of 64 elements per tile."""
TILE = 64 * GROUPS
LOW_WORD = 0xFFFFFFFF


@exact
def low_word(x: np.uint64) -> np.uint64:
    return U8(x & U8(0xFFFFFFFF))


@inner
def philox_words(first_group: int, key0: int, key1: int, stream: int, step: int, words: Array) -> None:
    """The words of TILE elements from element 64 * first_group on, in the order of elements.

    32-bit words in 64-bit lanes, because that is what the widening multiply of vector units takes and gives.
    """
    for group in range(GROUPS):
        for lane in range(16):
            counter = U8(((first_group + group) << 4) + lane)
            a = low_word(counter)
            b = U8(counter >> U8(32))
            c = U8(stream)
            d = U8(step)
            k0 = U8(key0)
            k1 = U8(key1)
            for _ in range(10):
                p = U8(0xD2511F53) * a
                q = U8(0xCD9E8D57) * c
                a = U8((q >> U8(32)) ^ b ^ k0)
                b = low_word(q)
                c = U8((p >> U8(32)) ^ d ^ k1)
                d = low_word(p)
                k0 = low_word(k0 + U8(0x9E3779B9))
                k1 = low_word(k1 + U8(0xBB67AE85))
            at = 64 * group + lane
            words[at] = U4(a)
            words[at + 16] = U4(b)
            words[at + 32] = U4(c)
            words[at + 48] = U4(d)


@inner
def keep_run(words: Array, threshold: np.uint32, scale: np.float32, x: Array, y: Array) -> None:
    for i in range(x.size):
        y[i] = x[i] * scale if words[i] >= threshold else F4(0)


@inner
def keep_and_add_run(words: Array, threshold: np.uint32, scale: np.float32, x: Array, residual: Array, y: Array) -> None:
    for i in range(x.size):
        y[i] = (x[i] * scale if words[i] >= threshold else F4(0)) + residual[i]


@kernel("void(f4[::1], f4[::1], f4[::1], i8, u8, u8, u8, u8, u8, f8)")
def keep_kernel(
    x: Array, residual: Array, y: Array, offset: int, key0: int, key1: int, stream: int, step: int, threshold: int, scale: float
) -> None:
    """y = x * scale where the word of the element is at least `threshold`, else 0; plus `residual` unless that is empty."""
    words = np.empty(TILE, np.uint32)
    stop = offset + x.size
    for tile in range(offset >> 6 << 6, stop, TILE):
        philox_words(tile >> 6, key0, key1, stream, step, words)
        lo = max(tile, offset)
        hi = min(tile + TILE, stop)
        drawn = words[lo - tile : hi - tile]
        lo -= offset
        hi -= offset
        if residual.size:
            keep_and_add_run(drawn, U4(threshold), F4(scale), x[lo:hi], residual[lo:hi], y[lo:hi])
        else:
            keep_run(drawn, U4(threshold), F4(scale), x[lo:hi], y[lo:hi])


def keep(pool: Pool, x: Array, rate: float, scale: float, rng: Philox, residual: Array | None) -> Array:
    """keep(e) * x * scale (+ residual), rounded once to the dtype of x."""
    x4 = wide(pool, x)
    y = pool.empty(x.shape)
    extra = NOTHING if residual is None else wide(pool, residual).reshape(-1)
    keep_kernel(
        x4.reshape(-1),
        extra,
        y.reshape(-1),
        rng.offset,
        rng.seed & LOW_WORD,
        (rng.seed >> 32) & LOW_WORD,
        rng.stream & LOW_WORD,
        rng.step & LOW_WORD,
        int(rate * 4294967296.0),
        scale,
    )
    return narrow(pool, y, x.dtype)


def dropout(pool: Pool, x: Array, rate: float, rng: Philox, residual: Array | None) -> Array:
    """See `Backend.dropout`."""
    return keep(pool, x, rate, 1.0 / (1.0 - rate), rng, residual)
