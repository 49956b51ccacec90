"""Between host and device through pinned memory. Imported by `cuda` alone.

Rule 1: uploads go in line with all other work, from a staging buffer that is kept until the device has read it.
Rule 2: a fetch is a copy on the device, in line, and then a copy to pinned memory on a stream of its own: later work waits for
nothing and cannot spoil what is fetched. Much of it (a checkpoint) goes in pieces, so that the device needs room for a few of these
only; then later work waits until the last pieces are on their way. The host never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import runtime

from dcnr.backends.base import HostArray
from dcnr.backends.cupy.array import DeviceArray

MOST_STAGED = 1 << 30
"""Bytes of uploads under way at which the next one waits for the first."""
PIECE = 256 << 20
"""Bytes of a fetch that go together."""
STAGES = 2
"""Pieces of one fetch that the device has room for."""
ALIGNMENT = 256
"""Of the arrays within one fetch."""


class CudaFetch:
    """A copy to the host that is under way."""

    def __init__(self, arrays: Sequence[DeviceArray], offsets: Sequence[int], memory: Any, done: Any, wait: Callable[[Any], None]) -> None:
        self._parts = [(array.shape, array.dtype, array.size, offset) for array, offset in zip(arrays, offsets, strict=True)]
        self._memory = memory
        self._done = done
        self._wait = wait

    def wait(self) -> list[HostArray]:
        """Arrays in pinned memory, which they keep alive."""
        self._wait(self._done)
        return [np.frombuffer(self._memory, dtype, count, offset).reshape(shape) for shape, dtype, count, offset in self._parts]


class Copies:
    """What is on its way. The caller holds the device's lock."""

    def __init__(self, stream: Any, wait: Callable[[Any], None]) -> None:
        """`wait` waits for an event, from any thread."""
        self._main = stream
        self._side = cupy.cuda.Stream(non_blocking=True)
        self._wait = wait
        self._pinned = cupy.cuda.PinnedMemoryPool()
        self._uploads: deque[tuple[Any, Any, int]] = deque()
        self._fetches: deque[tuple[Any, Any, list[DeviceArray]]] = deque()
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
        stages = [reserve(min(total, PIECE)) for _ in range(min(STAGES, -(-total // PIECE)))]
        self._move(_cuts(arrays, offsets), stages, memory.ptr)
        done = self._side.record(_event())
        self._fetches.append((done, memory, stages))
        return CudaFetch(arrays, offsets, memory, done, self._wait)

    def _move(self, cuts: Iterator[_Cut], stages: Sequence[DeviceArray], host: int) -> None:
        """Piece by piece: in line to a stage, which is free when what it held has left, and from there on the side to the host."""
        left: list[Any] = []
        for number, piece in groupby(cuts, key=lambda cut: cut.place // PIECE):
            stage, size = stages[number % len(stages)], 0
            if number >= len(stages):
                self._main.wait_event(left[number - len(stages)])
            for cut in piece:
                size = cut.place % PIECE + cut.size
                target = stage.ptr + cut.place % PIECE
                runtime.memcpyAsync(target, cut.address, cut.size, runtime.memcpyDeviceToDevice, self._main.ptr)
            self._side.wait_event(self._main.record(_event()))
            runtime.memcpyAsync(host + number * PIECE, stage.ptr, size, runtime.memcpyDeviceToHost, self._side.ptr)
            left.append(self._side.record(_event()))


class _Cut(NamedTuple):
    """What of one array lies in one piece of a fetch."""

    address: int
    """On the device."""
    place: int
    """In the whole fetch."""
    size: int


def _cuts(arrays: Sequence[DeviceArray], offsets: Sequence[int]) -> Iterator[_Cut]:
    """All of them, in order; an array is cut where a piece ends."""
    for array, offset in zip(arrays, offsets, strict=True):
        done, whole = 0, array.nbytes
        while done < whole:
            size = min(whole - done, PIECE - (offset + done) % PIECE)
            yield _Cut(array.ptr + done, offset + done, size)
            done += size


def _event() -> Any:
    """One that threads may sleep on."""
    return cupy.cuda.Event(block=True, disable_timing=True)
