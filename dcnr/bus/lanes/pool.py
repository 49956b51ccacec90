"""Buffers for incoming tensors that are used again once nothing refers to them.

The first touch of fresh memory costs more than eight warm copies, so buffers are worth keeping. Small ones are not.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np

from dcnr.bus.lanes.base import Bytes

POOLED_FROM = 256 << 10
_GRAIN = 256 << 10
_KEPT_BYTES = 128 << 20
"""Per size; at least two buffers."""


class Pool:
    """Free buffers by size. Arrays may be dropped on any thread."""

    def __init__(self) -> None:
        self._free: dict[int, deque[Bytes]] = {}

    def take(self, nbytes: int) -> Bytes:
        """`nbytes` bytes of any content. The buffer comes back by itself when the array and all views of it are gone."""
        if nbytes < POOLED_FROM:
            return np.empty(nbytes, np.uint8)
        size = -(-nbytes // _GRAIN) * _GRAIN
        free = self._free.get(size)
        if free is None:
            free = self._free[size] = deque(maxlen=max(2, _KEPT_BYTES // size))
        try:
            buffer = free.pop()
        except IndexError:
            buffer = np.empty(size, np.uint8)
        # Views of `lease` refer to it and not to `buffer`, since NumPy does not look through the memoryview.
        lease = np.frombuffer(buffer.data, np.uint8, nbytes)
        weakref.finalize(lease, free.append, buffer).atexit = False
        return lease
