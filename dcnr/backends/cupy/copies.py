"""Between host and device through pinned memory. Imported by `cuda` alone.

Rule 1: uploads go in line with all other work, from a staging buffer that is kept until the device has read it.
Rule 2: a fetch is a copy on the device, in line, and then a copy to pinned memory on a stream of its own: later work waits for
nothing and cannot spoil what is fetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from dcnr.backends.base import HostArray
from dcnr.backends.cupy.array import DeviceArray
from dcnr.errors import BackendUnavailable

MOST_STAGED = 1 << 30
"""Bytes of uploads under way at which the next one waits for the first."""
ALIGNMENT = 256
"""Of the arrays within one fetch."""


class CudaFetch:
    """A copy to the host that is under way."""

    def __init__(self, arrays: Sequence[DeviceArray], offsets: Sequence[int], memory: Any, done: Any, activate: Callable[[], None]) -> None:
        self._parts = [(array.shape, array.dtype, array.size, offset) for array, offset in zip(arrays, offsets, strict=True)]
        self._memory = memory
        self._done = done
        self._activate = activate

    def wait(self) -> list[HostArray]:
        """Arrays in pinned memory, which they keep alive."""
        self._activate()
        try:
            self._done.synchronize()
        except runtime.CUDARuntimeError as error:
            raise BackendUnavailable(f"The GPU fails: {error}.", "restart the agent; dcnr doctor checks the GPU") from error
        return [np.frombuffer(self._memory, dtype, count, offset).reshape(shape) for shape, dtype, count, offset in self._parts]


class Copies:
    """What is on its way. The caller holds the device's lock."""

    def __init__(self, stream: Any, activate: Callable[[], None]) -> None:
        self._main = stream
        self._side = cupy.cuda.Stream(non_blocking=True)
        self._activate = activate
        self._pinned = cupy.cuda.PinnedMemoryPool()
        self._uploads: deque[tuple[Any, Any, int]] = deque()
        self._fetches: deque[tuple[Any, DeviceArray]] = deque()
        self._staged = 0

    def upload(self, address: int, host: HostArray) -> None:
        """All bytes of `host` to `address`."""
        self._forget_uploads()
        flat = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
        memory = self._pinned.malloc(flat.size)
        np.frombuffer(memory, np.uint8, flat.size)[:] = flat
        runtime.memcpyAsync(address, memory.ptr, flat.size, runtime.memcpyHostToDevice, self._main.ptr)
        self._uploads.append((self._main.record(_event()), memory, flat.size))
        self._staged += flat.size

    def _forget_uploads(self) -> None:
        while self._uploads and (self._staged > MOST_STAGED or self._uploads[0][0].done):
            event, _, size = self._uploads.popleft()
            event.synchronize()
            self._staged -= size

    def fetch(self, arrays: Sequence[DeviceArray], reserve: Callable[[int], DeviceArray]) -> CudaFetch:
        """Begin; `reserve` gives bytes on the device."""
        while self._fetches and self._fetches[0][0].done:
            self._fetches.popleft()
        offsets, total = [], 0
        for array in arrays:
            offsets.append(total)
            total += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        memory = self._pinned.malloc(max(total, 1))
        snapshot = reserve(total)
        for array, offset in zip(arrays, offsets, strict=True):
            if array.nbytes:
                runtime.memcpyAsync(snapshot.ptr + offset, array.ptr, array.nbytes, runtime.memcpyDeviceToDevice, self._main.ptr)
        self._side.wait_event(self._main.record(_event()))
        if total:
            runtime.memcpyAsync(memory.ptr, snapshot.ptr, total, runtime.memcpyDeviceToHost, self._side.ptr)
        done = self._side.record(_event())
        self._fetches.append((done, snapshot))
        return CudaFetch(arrays, offsets, memory, done, self._activate)


def _event() -> Any:
    """One that threads may sleep on."""
    return cupy.cuda.Event(block=True, disable_timing=True)
