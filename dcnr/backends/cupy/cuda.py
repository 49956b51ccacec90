"""The device of a real NVIDIA GPU. Beside `copies`, `ipc` and `probe` the only file that imports CuPy.

Rule 1: one device a process. Every thread that comes by gets it as its current device; all work goes to one stream of our own.
Rule 2: memory comes from pools that keep what they once got from the driver. The stream is ordered, so what Python gives back may be
written again by whatever is issued next. A recording takes none of the ordinary pool: its graph has the addresses for as long as it lives.
Rule 3: whoever waits for the device is `synchronize`, `Fetch.wait`, an upload when too much is on its way already, and what happens
once: a pool that grows (on the device, or pinned), a kernel that is loaded, a recording that goes.
Rule 4: whoever issues holds the lock, so that a recording holds the work of its own thread and nothing else.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import cupy
from cupy.cuda import driver, runtime

from dcnr.backends.base import DeviceMemory, Fetch, HostArray, Recording
from dcnr.backends.cupy import cublaslt
from dcnr.backends.cupy.arguments import ArgumentPacker
from dcnr.backends.cupy.array import UINT8, DeviceArray, Dtype
from dcnr.backends.cupy.compile import architecture, load_cubin
from dcnr.backends.cupy.constants import Constants
from dcnr.backends.cupy.copies import Copies
from dcnr.backends.cupy.device import MAX_SHARED, Argument, Product
from dcnr.backends.cupy.ipc import IpcPort
from dcnr.backends.cupy.probe import capability_of, title, usable
from dcnr.backends.cupy.tensor_map import encode
from dcnr.errors import BackendUnavailable, InvariantError

MAX_DYNAMIC_SHARED_SIZE = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""
BEFORE_HOPPER = 89
"""The last compute capability before 9.0, times ten."""


FAILURES = (runtime.CUDARuntimeError, driver.CUDADriverError)
"""What CuPy raises when CUDA refuses, be it for an error of earlier work."""


class Kernel:
    """A function on the device; `shared` is the dynamic shared memory that it may have so far."""

    __slots__ = ("address", "issuing", "module", "shared")

    def __init__(self, module: Any, name: str, issuing: Issuing) -> None:
        function = module.get_function(name)
        self.issuing = issuing
        self.module = module, function
        self.address: int = function.ptr
        self.shared = MAX_SHARED

    def allow(self, shared: int) -> None:
        """Let it have so many bytes."""
        driver.funcSetAttribute(self.address, MAX_DYNAMIC_SHARED_SIZE, shared)
        self.shared = shared


class Pool:
    """Memory for recordings: all of it stays where it is until the pool goes.

    CuPy's own pool gives back what is free when the driver has no more, even if graphs have its addresses: here it is held beside that.
    """

    def __init__(self) -> None:
        held: list[Any] = []

        def reserve(size: int) -> Any:
            memory = cupy.cuda.Memory(size)
            held.append(memory)
            return cupy.cuda.MemoryPointer(memory, 0)

        self._held = held
        self._pool = cupy.cuda.MemoryPool(reserve)
        self.malloc: Callable[[int], Any] = self._pool.malloc

    def total_bytes(self) -> int:
        """Got from the driver."""
        return sum(memory.size for memory in self._held)


class CudaRecording:
    """A CUDA graph in the making, then a CUDA graph, and what it works in."""

    def __init__(self, device: CudaDevice, pool: Pool) -> None:
        self.pool = pool
        self.constants: dict[Hashable, DeviceArray] = {}
        self._device = device
        self._ran = False
        self._graph: Any = None

    def run(self, work: Callable[[], None]) -> None:
        """Call it, then record it, then replay it. Raises whatever `work` raises."""
        if not self._ran:
            self._device.run_apart(self, work)
            self._ran = True
            return
        if self._graph is None:
            self._graph = self._device.capture(self, work)
        self._device.replay(self._graph)


class _Here(threading.local):
    """What a thread has of the device: made when the thread first looks at it, which makes the device its current one."""

    def __init__(self, name: str, index: int, pool: Any) -> None:
        try:
            runtime.setDevice(index)
        except runtime.CUDARuntimeError as error:
            raise failure(name, "a new thread", error) from error
        self.pool = pool
        self.constants: dict[Hashable, DeviceArray] | None = None
        """Those of the recording under way."""
        self.captures = False
        """Whether this thread's work is being recorded rather than done."""

    def activate(self) -> None:
        """Make sure of the first look."""


class Issuing:
    """Whoever issues enters one: the device is the thread's, no other thread issues, and what CUDA refuses is told as a failure of `what`.

    Made once for each kind of work and for each kernel, since every launch enters one.
    """

    __slots__ = ("_acquire", "_here", "_name", "_recordable", "_release", "_what")

    def __init__(self, name: str, here: _Here, lock: threading.RLock, what: str, recordable: bool = True) -> None:
        self._name = name
        self._here = here
        self._acquire = lock.acquire
        self._release = lock.release
        self._what = what
        self._recordable = recordable

    def __enter__(self) -> None:
        self._here.activate()
        self._acquire()
        if not self._recordable and self._here.captures:
            self._release()
            raise InvariantError(f"{self._what} cannot be part of a recording: it would be done with the data of now, every time")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._release()
        if error is not None and isinstance(error, FAILURES):
            raise failure(self._name, self._what, error) from error


def failure(name: str, what: str, error: BaseException) -> BackendUnavailable:
    """What a person is told of an error of CUDA."""
    return BackendUnavailable(f"{name} fails at {what}: {error}.", "restart the agent; dcnr doctor checks the GPU")


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
        self._recorded: tuple[weakref.ref[Pool], ...] = ()
        """Replaced, never changed: any thread may be counting."""
        self._here = _Here(self.name, index, self._pool)
        self._lock = threading.RLock()
        at = self._at = partial(Issuing, self.name, self._here, self._lock)
        self._uploading, self._fetching = at("an upload", recordable=False), at("a fetch", recordable=False)
        self._copying, self._clearing, self._multiplying = at("a copy"), at("clearing"), at("a matrix product")
        self._loading, self._recording, self._replaying = at("loading a kernel"), at("a recording", recordable=False), at("a recorded pass")
        self._packer = ArgumentPacker()
        self._kernels: dict[tuple[str, ...], Kernel] = {}
        self._modules: dict[tuple[str, ...], Any] = {}
        self._constants = Constants()
        with at("the first stream"):
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._queue: int = self._stream.ptr
            self._copies = Copies(self._stream, self._wait_for)
            self._products = cublaslt.Products(self.empty((cublaslt.WORKSPACE,), UINT8), self._queue)

    # -- memory -------------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
        """Uninitialised; from the recording's own memory while this thread records."""
        return self._allocated(self._here.pool, shape, dtype)

    def _allocated(self, pool: Any, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
        """The array keeps its pool too, and lets go of it last: CuPy's memory does not live longer than its pool."""
        size = math.prod(shape) * dtype.itemsize
        try:
            memory = pool.malloc(size)
        except cupy.cuda.memory.OutOfMemoryError:
            raise self._no_room(size) from None
        except runtime.CUDARuntimeError as error:
            raise failure(self.name, "an allocation", error) from error
        return DeviceArray(memory.ptr, shape, dtype, (pool, memory))

    def _no_room(self, size: int) -> BackendUnavailable:
        free = runtime.memGetInfo()[0] >> 20
        return BackendUnavailable(
            f"{self.name} has no room for {size >> 20} MiB: this agent holds {self.memory().used >> 20} MiB, "
            f"{free} of {self._total >> 20} MiB are free.",
            "use smaller micro-batches or `recompute: true`, spread the network over more GPUs, or end what else runs on this one",
        )

    def upload(self, into: DeviceArray, host: HostArray) -> None:
        """Through pinned memory, on the stream of all work."""
        with self._uploading:
            if into.nbytes:
                self._copies.upload(into.ptr, host)

    def fetch(self, arrays: Sequence[DeviceArray]) -> Fetch:
        """A copy on the device, and from there to pinned memory on a stream of its own: later work neither waits nor does harm."""
        with self._fetching:
            return self._copies.fetch(arrays, lambda size: self.empty((size,), UINT8))

    def copy(self, into: DeviceArray, source: DeviceArray) -> None:
        """The same number of bytes."""
        if into.nbytes != source.nbytes:
            raise InvariantError(f"{source.nbytes} bytes do not fit {into.nbytes}")
        if into.nbytes:
            with self._copying:
                runtime.memcpyAsync(into.ptr, source.ptr, into.nbytes, runtime.memcpyDeviceToDevice, self._queue)

    def clear(self, into: DeviceArray) -> None:
        """All bytes zero."""
        if into.nbytes:
            with self._clearing:
                runtime.memsetAsync(into.ptr, 0, into.nbytes, self._queue)

    def constant(self, key: Hashable, make: Callable[[], HostArray]) -> DeviceArray:
        """From the ordinary pool, and a recording keeps what it used."""

        def uploaded() -> DeviceArray:
            host = make()
            array = self._allocated(self._pool, host.shape, host.dtype)
            self.upload(array, host)
            return array

        with self._lock:
            return self._constants.get(key, uploaded, self._here.constants)

    def ipc(self) -> IpcPort:
        """For tensors that go to other processes of this host without leaving devices."""
        return IpcPort(self._stream, partial(self._at, recordable=False), self._wait_for, self.empty, self.fetch)

    def memory(self) -> DeviceMemory:
        """What our pools hold; they keep what they once got, so this is the most that was ever needed at once."""
        self._here.activate()
        recorded = [pool.total_bytes() for one in self._recorded if (pool := one()) is not None]
        return DeviceMemory(self._total, self._pool.total_bytes() + sum(recorded))

    # -- work ---------------------------------------------------------------------------------------------------------

    def kernel(self, source: str, name: str, *defines: str) -> Kernel:
        """Compiled at first use."""
        found = self._kernels.get((source, name, *defines))
        if found is None:
            with self._loading:
                issuing = self._at(f"kernel {name} of {source}.cu")
                found = self._kernels[(source, name, *defines)] = Kernel(self._module(source, defines), name, issuing)
        return found

    def _module(self, source: str, defines: tuple[str, ...]) -> Any:
        if (source, *defines) not in self._modules:
            module = cupy.cuda.function.Module()
            module.load(load_cubin(source, defines, self._architecture))
            self._modules[(source, *defines)] = module
        return self._modules[(source, *defines)]

    def launch(self, kernel: Kernel, grid: tuple[int, int], block: int, args: Sequence[Argument], shared: int = 0) -> None:
        """Raises `BackendUnavailable` if the driver refuses, be it for an error of earlier work."""
        with kernel.issuing:
            if shared > kernel.shared:
                kernel.allow(shared)
            table = self._packer.pack(args)
            driver.launchKernel(kernel.address, grid[0], grid[1], 1, block, 1, 1, shared, self._queue, table, 0)

    def product(self, kind: Product, a: DeviceArray, b: DeviceArray, out: DeviceArray, bias: DeviceArray | None = None) -> None:
        """By cuBLASLt."""
        with self._multiplying:
            self._products.run(kind, a, b, out, bias)

    def tensor_map(self, array: DeviceArray, dims: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> bytes:
        """Kept for arrays that come back at the same address."""
        return encode(array.ptr, array.dtype.name, tuple(dims), tuple(strides), tuple(box))

    def recording(self, beside: Recording | None = None) -> Recording:
        """A fresh one, with a pool of its own or that of `beside`; the pool goes with the last of its recordings and arrays."""
        if isinstance(beside, CudaRecording):
            return CudaRecording(self, beside.pool)
        pool = Pool()
        with self._lock:
            self._recorded = (*(one for one in self._recorded if one() is not None), weakref.ref(pool))
        return CudaRecording(self, pool)

    def run_apart(self, recording: CudaRecording, work: Callable[[], None]) -> None:
        """Run `work` in the recording's memory, so that recording it finds enough there."""
        with self._apart(recording):
            work()

    def capture(self, recording: CudaRecording, work: Callable[[], None]) -> Any:
        """The graph of `work`, which issues nothing.

        Relaxed, so that memory may still be reserved: Python holds the results of the first run until this one ends.
        """
        with self._apart(recording):
            self._stream.begin_capture(runtime.streamCaptureModeRelaxed)
            self._here.captures = True
            try:
                work()
            except BaseException:
                self._abandon()
                raise
            finally:
                self._here.captures = False
            return self._stream.end_capture()

    @contextmanager
    def _apart(self, recording: CudaRecording) -> Iterator[None]:
        with self._recording:
            here = self._here
            pool, constants = here.pool, here.constants
            here.pool, here.constants = recording.pool, recording.constants
            try:
                yield
            finally:
                here.pool, here.constants = pool, constants

    def _abandon(self) -> None:
        """Leave a capture whose work failed; it may have broken off the capture itself."""
        try:
            self._stream.end_capture()
        except runtime.CUDARuntimeError:
            return

    def replay(self, graph: Any) -> None:
        """Issue a graph."""
        with self._replaying:
            graph.launch(self._stream)

    def synchronize(self) -> None:
        """Raises `BackendUnavailable` if anything issued so far failed."""
        self._wait_for(self._stream)

    def _wait_for(self, issued: Any) -> None:
        """A stream or an event, without the lock."""
        self._here.activate()
        try:
            issued.synchronize()
        except runtime.CUDARuntimeError as error:
            raise failure(self.name, "work issued before", error) from error
