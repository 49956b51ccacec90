"""Memory that is used again, because the first touch of a fresh page costs 8 to 40 times a warm write.

Rule 1: an array of the pool stands on a lease, which stands on a block: aligned to 64 bytes, of one size class.
Rule 2: NumPy keeps the lease alive as the `base` of the array, and through it of every view; when the last of them dies the lease puts
the block back. Lease and block are subclasses of ndarray because NumPy shortens chains of plain ndarrays, and would skip the lease.
Rule 3: threads need no lock of their own: `list.append` and `list.pop` are atomic. The lock guards only the count of bytes held.
"""

from __future__ import annotations

import math
import os
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

FLOAT32 = np.dtype(np.float32)
ALIGNMENT = 64
SMALL = 4096
"""Bytes below which malloc's own cache does as well."""


class Block(np.ndarray[Any, Any]):
    """Aligned bytes that live as long as the pool."""

    __slots__ = ()


class Lease(np.ndarray[Any, Any]):
    """A block in use; gives it back to the free list `home` when it dies."""

    __slots__ = ("home",)
    home: list[Block]

    def __del__(self) -> None:
        self.home.append(self.base)  # type: ignore[arg-type]


class Pool:
    """Blocks by size class, four classes to each doubling."""

    def __init__(self, keep_idle: int | None = None) -> None:
        """`keep_idle`: how many idle bytes may lie about before new sizes push them out; a quarter of the RAM unless given."""
        self._free: dict[int, list[Block]] = {}
        self._lock = threading.Lock()
        self._held = 0
        self._keep_idle = total_memory() // 4 if keep_idle is None else keep_idle

    @property
    def held(self) -> int:
        """Bytes of all blocks, in use or not."""
        return self._held

    @property
    def idle(self) -> int:
        """Bytes of the blocks that nobody uses."""
        return sum(size * len(blocks) for size, blocks in list(self._free.items()))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any] = FLOAT32) -> npt.NDArray[Any]:
        """An uninitialised C-ordered array."""
        bytes_needed = math.prod(shape) * dtype.itemsize
        if bytes_needed < SMALL:
            return np.empty(shape, dtype)
        shift = bytes_needed.bit_length() - 3
        size = -(-bytes_needed >> shift) << shift
        home = self._free.get(size)
        if home is None:
            home = self._free.setdefault(size, [])
        try:
            block = home.pop()
        except IndexError:
            block = self._new_block(size)
        lease = block.view(Lease)
        lease.home = home
        return np.ndarray(shape, dtype, lease)

    def _new_block(self, size: int) -> Block:
        with self._lock:
            if self.idle > self._keep_idle:
                self._drop_idle()
            self._held += size
        raw = np.empty(size + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + size].view(Block)

    def _drop_idle(self) -> None:
        """The sizes in use have changed (another network): hand back what the old ones left."""
        for size, blocks in list(self._free.items()):
            while blocks:
                try:
                    blocks.pop()
                except IndexError:  # another thread took the last one
                    break
                self._held -= size


def total_memory() -> int:
    """Bytes of RAM of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
