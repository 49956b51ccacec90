"""Random masks: Philox 4x32-10 (Salmon et al. 2011) in the element order that `backends.base.Philox` lays down.

A vector unit works on blocks side by side and then interleaves their words, whose 16-bit halves are the elements in order.
Masks are made and used at most `TILE` elements at a time and never stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dcnr.backends.base import Philox, dropout_scale, dropout_threshold
from dcnr.backends.cpu.activation import NOTHING
from dcnr.backends.cpu.casts import narrow, wide
from dcnr.backends.cpu.functions import F4
from dcnr.backends.cpu.jit import exact, inner, kernel
from dcnr.backends.cpu.pool import Pool

Array = npt.NDArray[Any]
U4 = np.uint32
U8 = np.uint64
LANES = 16
"""Blocks side by side."""
GROUP = 8 * LANES
"""Elements of so many blocks."""
TILE = 8 * GROUP
LOW_WORD = 0xFFFFFFFF

Key = tuple[int, int, int, int]
"""Both halves of the seed, stream, step: what is the same for all blocks of a mask."""
KEY = "UniTuple(i8, 4)"
"""The same for signatures of kernels."""


@exact
def low_word(x: np.uint64) -> np.uint64:
    return U8(x & U8(0xFFFFFFFF))


@inner
def philox_halves(first_block: int, groups: int, key: Key, words: Array) -> None:
    """The halves of `groups` * GROUP elements from element 8 * first_block on, two to a 32-bit word.

    32-bit words in 64-bit lanes, because that is what the widening multiply of vector units takes and gives.
    """
    key0, key1, stream, step = key
    for group in range(groups):
        for lane in range(LANES):
            counter = U8(first_block + LANES * group + lane)
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
            at = 2 * (LANES * group + lane)
            words[at] = U8(a | (b << U8(32)))
            words[at + 1] = U8(c | (d << U8(32)))


@inner
def keep_run(halves: Array, threshold: np.uint32, scale: np.float32, x: Array, y: Array) -> None:
    for i in range(x.size):
        y[i] = x[i] * scale if U4(halves[i]) >= threshold else F4(0)


@inner
def keep_and_add_run(halves: Array, threshold: np.uint32, scale: np.float32, x: Array, residual: Array, y: Array) -> None:
    for i in range(x.size):
        y[i] = (x[i] * scale if U4(halves[i]) >= threshold else F4(0)) + residual[i]


@inner
def keep_all(key: Key, threshold: int, scale: float, offset: int, words: Array, x: Array, residual: Array, y: Array) -> None:
    """y = x * scale where the half of the element is at least `threshold`, else 0; plus `residual` unless that is empty.

    `words` is room for the halves of TILE elements.
    """
    halves = words.view(np.uint16)
    stop = offset + x.size
    for tile in range(offset >> 3 << 3, stop, TILE):
        lo = max(tile, offset)
        hi = min(tile + TILE, stop)
        philox_halves(tile >> 3, (hi - tile + GROUP - 1) // GROUP, key, words)
        drawn = halves[lo - tile : hi - tile]
        lo -= offset
        hi -= offset
        if residual.size:
            keep_and_add_run(drawn, U4(threshold), F4(scale), x[lo:hi], residual[lo:hi], y[lo:hi])
        else:
            keep_run(drawn, U4(threshold), F4(scale), x[lo:hi], y[lo:hi])


@kernel(f"void({KEY}, i8, f8, i8, f4[::1], f4[::1], f4[::1])")
def keep_kernel(key: Key, threshold: int, scale: float, offset: int, x: Array, residual: Array, y: Array) -> None:
    keep_all(key, threshold, scale, offset, np.empty(TILE // 4, np.uint64), x, residual, y)


def key_of(rng: Philox) -> Key:
    """What kernels take of a mask source besides its offset."""
    return rng.seed & LOW_WORD, (rng.seed >> 32) & LOW_WORD, rng.stream & LOW_WORD, rng.step & LOW_WORD


def keep(pool: Pool, x: Array, rate: float, scale: float, rng: Philox, residual: Array | None) -> Array:
    """keep(e) * x * scale (+ residual), rounded once to the dtype of x."""
    x4 = wide(pool, x)
    y = pool.empty(x.shape)
    extra = NOTHING if residual is None else wide(pool, residual).reshape(-1)
    keep_kernel(key_of(rng), dropout_threshold(rate), scale, rng.offset, x4.reshape(-1), extra, y.reshape(-1))
    return narrow(pool, y, x.dtype)


def dropout(pool: Pool, x: Array, rate: float, rng: Philox, residual: Array | None) -> Array:
    """See `Backend.dropout`."""
    return keep(pool, x, rate, dropout_scale(rate), rng, residual)
