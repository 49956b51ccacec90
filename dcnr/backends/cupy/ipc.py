"""Memory of the device that other processes of the host can open, and copies from and to it. Imported by `cuda` alone.

Rule 1: a copy waits for everything that was issued before it was asked for, and runs on a stream of its own: later work does not wait.
Rule 2: it has no effect on what a recording holds, since whoever issues holds the device's lock, as everywhere.
Rule 3: memory for others comes from the driver and not from a pool: a handle stands for a whole allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import cupy
from cupy.cuda import runtime

from dcnr.backends.base import Fetch, HostArray
from dcnr.backends.cupy.array import DeviceArray, Dtype

LAZY_PEER_ACCESS = 1
"""cudaIpcMemLazyEnablePeerAccess: the memory may lie on another GPU."""


class IpcPort:
    """One device, as the lane between processes needs it (`bus.lanes.base.DevicePort`). Every method may be called on any thread.

    `issuing` is entered by whoever issues something, which it names; `wait` waits for an event.
    """

    def __init__(
        self,
        stream: Any,
        issuing: Callable[[str], AbstractContextManager[None]],
        wait: Callable[[Any], None],
        empty: Callable[[tuple[int, ...], Dtype], DeviceArray],
        fetch: Callable[[Sequence[DeviceArray]], Fetch],
    ) -> None:
        self._main = stream
        self._issuing = issuing
        self._wait = wait
        self._fetch = fetch
        self.empty = empty
        with issuing("a stream for other processes"):
            self._side = cupy.cuda.Stream(non_blocking=True)

    def stage(self, nbytes: int) -> tuple[int, bytes]:
        """Memory that other processes may open: its address, and the handle by which they do."""
        with self._issuing(f"reserving {nbytes >> 20} MiB for other processes"):
            address = runtime.malloc(nbytes)
            return address, bytes(runtime.ipcGetMemHandle(address))

    def unstage(self, address: int) -> None:
        """Give it back; nobody may use it any more."""
        with self._issuing("giving back memory for other processes"):
            runtime.free(address)

    def open(self, handle: bytes) -> int:
        """The address of another process's memory here; of one GPU or of two that can reach each other."""
        with self._issuing("opening memory of another process"):
            return int(runtime.ipcOpenMemHandle(handle, LAZY_PEER_ACCESS))

    def close(self, address: int) -> None:
        """Let go of what was opened."""
        with self._issuing("closing memory of another process"):
            runtime.ipcCloseMemHandle(address)

    def copy(self, into: int, source: int, nbytes: int) -> None:
        """Behind everything issued so far; it is done when this returns."""
        with self._issuing("a copy between processes"):
            self._side.wait_event(self._main.record(_event()))
            runtime.memcpyAsync(into, source, nbytes, runtime.memcpyDefault, self._side.ptr)
            done = self._side.record(_event())
        self._wait(done)

    def fetch(self, buffer: DeviceArray) -> HostArray:
        """The array in host memory."""
        return self._fetch([buffer]).wait()[0]


def _event() -> Any:
    """One that threads may sleep on."""
    return cupy.cuda.Event(block=True, disable_timing=True)
