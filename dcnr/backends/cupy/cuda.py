"""The device of a real NVIDIA GPU. Beside `copies` and `probe` the only file that imports CuPy.

Rule 1: one device a process. Every thread that comes by gets it as its current device; all work goes to one stream of our own.
Rule 2: memory comes from a pool that keeps what it once got from the driver. The stream is ordered, so what Python gives back may be
written again by whatever is issued next.
Rule 3: nothing waits for the device but `synchronize`, `Fetch.wait`, and an upload when too much is on its way already.
Rule 4: whoever issues holds the lock, so that a recording holds the work of its own thread and nothing else.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver, runtime

from dcnr.backends.base import DeviceMemory, Fetch, HostArray, Recording
from dcnr.backends.cupy import cublaslt
from dcnr.backends.cupy.arguments import ArgumentPacker
from dcnr.backends.cupy.array import DeviceArray, Dtype
from dcnr.backends.cupy.compile import architecture, load_cubin
from dcnr.backends.cupy.copies import Copies
from dcnr.backends.cupy.device import MAX_SHARED, Argument, Product
from dcnr.backends.cupy.probe import capability_of, title, usable
from dcnr.backends.cupy.tensor_map import encode
from dcnr.errors import BackendUnavailable, InvariantError

MAX_DYNAMIC_SHARED_SIZE = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""
BEFORE_HOPPER = 89
"""The last compute capability before 9.0, times ten."""


class Kernel:
    """A function on the device; `shared` is the dynamic shared memory that it may have so far."""

    __slots__ = ("address", "module", "name", "shared")

    def __init__(self, module: Any, name: str) -> None:
        function = module.get_function(name)
        self.name = name
        self.module = module, function
        self.address: int = function.ptr
        self.shared = MAX_SHARED

    def allow(self, shared: int) -> None:
        """Let it have so many bytes."""
        driver.funcSetAttribute(self.address, MAX_DYNAMIC_SHARED_SIZE, shared)
        self.shared = shared


class CudaRecording:
    """A CUDA graph in the making, then a CUDA graph."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._ran = False
        self._graph: Any = None

    def run(self, work: Callable[[], None]) -> None:
        """Call it, then record it, then replay it. Raises whatever `work` raises."""
        if not self._ran:
            self._device.run_apart(work)
            self._ran = True
            return
        if self._graph is None:
            self._graph = self._device.capture(work)
        self._device.replay(self._graph)


class _Here(threading.local):
    """What a thread has of the device: made when the thread first asks."""

    def __init__(self, index: int, pool: Any) -> None:
        runtime.setDevice(index)
        self.pool = pool


class CudaDevice:
    """See `device.Device`."""

    def __init__(self, index: int = 0, hopper: bool = True) -> None:
        """GPU number `index`; without `hopper` a card of capability 9.0 is used like an older one.

        Raises `BackendUnavailable` if there is none that we can use."""
        properties = usable(index)
        self.name = title(properties, index)
        capability = capability_of(properties)
        self.capability = capability if hopper else min(capability, BEFORE_HOPPER)
        self._architecture = architecture(capability)
        self.multiprocessors: int = properties["multiProcessorCount"]
        self._total: int = properties["totalGlobalMem"]
        self._pool = cupy.cuda.MemoryPool()
        self._recorded_pool = cupy.cuda.MemoryPool()
        self._here = _Here(index, self._pool)
        self._activate()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._queue: int = self._stream.ptr
        self._lock = threading.RLock()
        self._recording = False
        self._packer = ArgumentPacker()
        self._kernels: dict[tuple[str, ...], Kernel] = {}
        self._modules: dict[tuple[str, ...], Any] = {}
        self._copies = Copies(self._stream, self._activate)
        self._products = cublaslt.Products(self.empty((cublaslt.WORKSPACE,), np.dtype(np.uint8)), self._queue)

    def _activate(self) -> None:
        """Make the device current in this thread, if it is not yet."""
        self._here.pool  # noqa: B018  the first look in a thread does it

    # -- memory -------------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
        """Uninitialised; from the recording's own memory while this thread records."""
        size = math.prod(shape) * dtype.itemsize
        try:
            memory = self._here.pool.malloc(size)
        except cupy.cuda.memory.OutOfMemoryError:
            raise self._no_room(size) from None
        return DeviceArray(memory.ptr, shape, dtype, memory)

    def _no_room(self, size: int) -> BackendUnavailable:
        free = runtime.memGetInfo()[0] >> 20
        return BackendUnavailable(
            f"{self.name} has no room for {size >> 20} MiB: this agent holds {self.memory().used >> 20} MiB, "
            f"{free} of {self._total >> 20} MiB are free.",
            "use smaller micro-batches or `recompute: true`, spread the network over more GPUs, or end what else runs on this one",
        )

    def upload(self, into: DeviceArray, host: HostArray) -> None:
        """Through pinned memory, on the stream of all work."""
        self._not_while_recording("an upload")
        if into.nbytes:
            with self._lock:
                self._activate()
                self._copies.upload(into.ptr, host)

    def fetch(self, arrays: Sequence[DeviceArray]) -> Fetch:
        """A copy on the device, and from there to pinned memory on a stream of its own: later work neither waits nor does harm."""
        self._not_while_recording("a fetch")
        with self._lock:
            return self._copies.fetch(arrays, lambda size: self.empty((size,), np.dtype(np.uint8)))

    def copy(self, into: DeviceArray, source: DeviceArray) -> None:
        """The same number of bytes."""
        if into.nbytes != source.nbytes:
            raise InvariantError(f"{source.nbytes} bytes do not fit {into.nbytes}")
        if into.nbytes:
            with self._lock:
                self._activate()
                runtime.memcpyAsync(into.ptr, source.ptr, into.nbytes, runtime.memcpyDeviceToDevice, self._queue)

    def clear(self, into: DeviceArray) -> None:
        """All bytes zero."""
        if into.nbytes:
            with self._lock:
                self._activate()
                runtime.memsetAsync(into.ptr, 0, into.nbytes, self._queue)

    def memory(self) -> DeviceMemory:
        """What our pools hold; they keep what they once got, so this is the most that was ever needed at once."""
        return DeviceMemory(self._total, self._pool.total_bytes() + self._recorded_pool.total_bytes())

    # -- work ---------------------------------------------------------------------------------------------------------

    def kernel(self, source: str, name: str, *defines: str) -> Kernel:
        """Compiled at first use."""
        found = self._kernels.get((source, name, *defines))
        if found is None:
            with self._lock:
                found = self._kernels[(source, name, *defines)] = Kernel(self._module(source, defines), name)
        return found

    def _module(self, source: str, defines: tuple[str, ...]) -> Any:
        if (source, *defines) not in self._modules:
            self._activate()
            module = cupy.cuda.function.Module()
            module.load(load_cubin(source, defines, self._architecture))
            self._modules[(source, *defines)] = module
        return self._modules[(source, *defines)]

    def launch(self, kernel: Kernel, grid: tuple[int, int], block: int, args: Sequence[Argument], shared: int = 0) -> None:
        """Raises `BackendUnavailable` if the driver refuses, be it for an error of earlier work."""
        with self._lock:
            self._activate()
            try:
                if shared > kernel.shared:
                    kernel.allow(shared)
                table = self._packer.pack(args)
                driver.launchKernel(kernel.address, grid[0], grid[1], 1, block, 1, 1, shared, self._queue, table, 0)
            except driver.CUDADriverError as error:
                raise self._failed(f"kernel {kernel.name} over {grid} x {block} threads with {shared} bytes", error) from error

    def product(self, kind: Product, a: DeviceArray, b: DeviceArray, out: DeviceArray, bias: DeviceArray | None = None) -> None:
        """By cuBLASLt."""
        with self._lock:
            self._activate()
            self._products.run(kind, a, b, out, bias)

    def tensor_map(self, array: DeviceArray, dims: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> bytes:
        """Kept for arrays that come back at the same address."""
        return encode(array.ptr, array.dtype.name, tuple(dims), tuple(strides), tuple(box))

    def recording(self) -> Recording:
        """A fresh one."""
        return CudaRecording(self)

    def run_apart(self, work: Callable[[], None]) -> None:
        """Run `work` in the memory of recordings, so that recording it finds enough there."""
        with self._apart():
            work()

    def capture(self, work: Callable[[], None]) -> Any:
        """The graph of `work`, which issues nothing.

        Relaxed, so that memory may still be reserved: Python holds the results of the first run until this one ends.
        """
        with self._apart():
            self._stream.begin_capture(runtime.streamCaptureModeRelaxed)
            self._recording = True
            try:
                work()
            except BaseException:
                self._abandon()
                raise
            finally:
                self._recording = False
            return self._stream.end_capture()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        with self._lock:
            self._not_while_recording("a recording")
            self._here.pool = self._recorded_pool
            try:
                yield
            finally:
                self._here.pool = self._pool

    def _abandon(self) -> None:
        """Leave a capture whose work failed; it may have broken off the capture itself."""
        try:
            self._stream.end_capture()
        except runtime.CUDARuntimeError:
            return

    def replay(self, graph: Any) -> None:
        """Issue a graph."""
        with self._lock:
            self._activate()
            try:
                graph.launch(self._stream)
            except runtime.CUDARuntimeError as error:
                raise self._failed("a recorded pass", error) from error

    def synchronize(self) -> None:
        """Raises `BackendUnavailable` if anything issued so far failed."""
        self._activate()
        try:
            self._stream.synchronize()
        except runtime.CUDARuntimeError as error:
            raise self._failed("work issued before", error) from error

    def _not_while_recording(self, what: str) -> None:
        if self._recording:
            raise InvariantError(f"{what} cannot be part of a recording: it would be done with the data of now, every time")

    def _failed(self, what: str, error: Exception) -> BackendUnavailable:
        return BackendUnavailable(f"{self.name} fails at {what}: {error}.", "restart the agent; dcnr doctor checks the GPU")
