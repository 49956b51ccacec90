"""Philox 4x32-10, the counter-based generator behind every random mask.

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dcnr.backends.base import HostArray, Philox, dropout_threshold

Words = npt.NDArray[np.uint32]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Ten rounds over arrays of counters (of equal shapes): four random words each."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0 = c0.astype(np.uint64) * _MULTIPLIERS[0]
        product1 = c2.astype(np.uint64) * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            _high(product1) ^ c1 ^ np.uint32(k0),
            _low(product1),
            _high(product0) ^ c3 ^ np.uint32(k1),
            _low(product0),
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def halves(rng: Philox, count: int) -> npt.NDArray[np.uint16]:
    """The 16 bits of elements rng.offset, …, rng.offset + count - 1; `base.Philox` says which block serves which element."""
    first, last = rng.offset >> 3, (rng.offset + count - 1) >> 3
    c = np.arange(first, last + 1, dtype=np.uint64)
    stream, step = (np.full(c.shape, value & _LOW, np.uint32) for value in (rng.stream, rng.step))
    words = np.stack(philox4x32((_low(c), _high(c), stream, step), (rng.seed & _LOW, (rng.seed >> 32) & _LOW)), axis=-1)
    of_words = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=-1).astype(np.uint16)
    start = rng.offset - (first << 3)
    return of_words.reshape(-1)[start : start + count]


def keep_mask(x: HostArray, rate: float, rng: Philox) -> npt.NDArray[np.bool_]:
    """Which elements of `x` stay: a share of 1 - rate."""
    return (halves(rng, x.size) >= dropout_threshold(rate)).reshape(x.shape)


def _high(product: npt.NDArray[np.uint64]) -> Words:
    return (product >> np.uint64(32)).astype(np.uint32)


def _low(product: npt.NDArray[np.uint64]) -> Words:
    return (product & np.uint64(_LOW)).astype(np.uint32)
