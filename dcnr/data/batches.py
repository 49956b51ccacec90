"""Which tokens a step sees: a function of (seed, step), so that a replay or another machine sees the same.

A split of N tokens is read in epochs. An epoch cuts it into windows of T + 1 tokens, each beginning at the last token of the one before
(T inputs and T targets, so that every token but the ends is once an input and once a target). The first begins at a random offset;
their order is a random permutation. Both are drawn from a Philox generator keyed by (seed, epoch). The epochs one after the other are an
endless stream of windows, of which step s (counted from 1) takes the next B. So every window is seen once per epoch, also where an epoch
has fewer than B.

Every epoch has the same number of windows, so that a step finds its epoch by one division: a window less than would fit, where that
leaves any, so that every offset below T is possible. Tokens left out at the ends differ from epoch to epoch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Starts = npt.NDArray[np.int64]
"""Index of the first token of each window."""

MAX_STEP = 2**53
"""Of any session: what a float64 counts exactly."""
MAX_BATCH = 1 << 16
"""Rows of a step."""
MAX_SEED = 2**63 - 1

_WORD = (1 << 64) - 1


def windows_per_epoch(tokens: int, seq_len: int) -> int:
    """Number of windows in every epoch of a split of `tokens` > `seq_len` tokens."""
    return max(1, (tokens - seq_len) // seq_len)


def epoch_starts(tokens: int, seq_len: int, seed: int, epoch: int) -> Starts:
    """Where the windows of epoch `epoch` (counted from 0) start, in their order."""
    count = windows_per_epoch(tokens, seq_len)
    last_offset = min(seq_len - 1, tokens - 1 - count * seq_len)
    generator = np.random.Generator(np.random.Philox(key=np.array([seed & _WORD, epoch & _WORD], dtype=np.uint64)))
    offset = int(generator.integers(0, last_offset, endpoint=True))
    return generator.permutation(count).astype(np.int64) * seq_len + offset


def batch_starts(order: Callable[[int], Starts], windows: int, step: int, batch: int) -> Starts:
    """Where the `batch` windows of step `step` (counted from 1) start. `order(epoch)` gives that epoch's `windows` starts."""
    first, stop = (step - 1) * batch, step * batch
    found = []
    while first < stop:
        epoch, position = divmod(first, windows)
        taken = order(epoch)[position : position + stop - first]
        found.append(taken)
        first += len(taken)
    return np.concatenate(found)


def gather(read: Callable[[int, int], npt.NDArray[np.unsignedinteger]], starts: Starts, seq_len: int) -> npt.NDArray[np.int64]:
    """The windows at `starts`, as ids [B, T + 1]. `read(start, stop)` gives tokens."""
    return np.stack([read(start, start + seq_len + 1) for start in starts.tolist()]).astype(np.int64)
