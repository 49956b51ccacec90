"""A device made of host memory, which several processes of a test can open as they could a GPU's."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dcnr.bus.lanes.base import Array, DeviceBuffer
from dcnr.bus.lanes.cuda_ipc import HANDLE
from dcnr.errors import BackendUnavailable

_handles = itertools.count(1)


class FakeBuffer:
    """A tensor there."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype
        self.nbytes = array.nbytes
        self.ptr = int(array.ctypes.data)


@dataclass
class FakeHost:
    """What is staged on one host."""

    staged: dict[bytes, Array] = field(default_factory=dict)


@dataclass
class FakePort:
    """One process's device. `broken` names what it refuses to do."""

    host: FakeHost
    broken: set[str] = field(default_factory=set)
    opened: list[int] = field(default_factory=list)

    def _check(self, what: str) -> None:
        if what in self.broken:
            raise BackendUnavailable(f"the device does not {what}")

    def stage(self, nbytes: int) -> tuple[int, bytes]:
        """Room that others may open."""
        self._check("stage")
        handle = next(_handles).to_bytes(HANDLE, "little")
        self.host.staged[handle] = np.zeros(nbytes, np.uint8)
        return int(self.host.staged[handle].ctypes.data), handle

    def unstage(self, address: int) -> None:
        """As long as it is there."""
        (handle,) = [known for known, room in self.host.staged.items() if int(room.ctypes.data) == address]
        del self.host.staged[handle]

    def open(self, handle: bytes) -> int:
        """Each handle once, as the real one asks for."""
        self._check("open")
        if handle not in self.host.staged:
            raise BackendUnavailable("no such handle")
        address = int(self.host.staged[handle].ctypes.data)
        assert address not in self.opened
        self.opened.append(address)
        return address

    def close(self, address: int) -> None:
        """What was opened."""
        self.opened.remove(address)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> FakeBuffer:
        """Poisoned."""
        return FakeBuffer(np.full(shape, 77).astype(dtype))

    def copy(self, into: int, source: int, nbytes: int) -> None:
        """At once."""
        self._check("copy")
        ctypes.memmove(into, source, nbytes)

    def fetch(self, buffer: DeviceBuffer) -> Array:
        """A copy."""
        assert isinstance(buffer, FakeBuffer)
        return buffer.array.copy()
