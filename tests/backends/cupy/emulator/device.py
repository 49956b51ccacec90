"""A device made of NumPy memory and of the kernels compiled for the CPU: the same wrappers, the same `.cu` files, no GPU.

It is stricter than a GPU: new memory is full of NaN, writes outside of an array are found after the launch that did them, arguments are
compared with what the kernel declares, transfers are counted, and `reverse` runs threads and blocks in the opposite order.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dcnr.backends.base import DeviceMemory, HostArray, Recording
from dcnr.backends.cupy.arguments import ArgumentPacker
from dcnr.backends.cupy.array import DeviceArray, Dtype
from dcnr.backends.cupy.constants import Constants
from dcnr.backends.cupy.device import Argument, Product
from tests.backends.cupy.emulator.build import KERNELS, library

GUARD = 256
"""Bytes of NaN in front of and behind each array."""
TOTAL = 1 << 34
MAX_DYNAMIC_SHARED = {70: 96 << 10, 80: 163 << 10, 90: 227 << 10}
_NAN = b"\xff" * GUARD
_POINTERS = "FDBHILP"
_KINDS = {
    "F": "float32",
    "D": "float64",
    "B": "int8 uint8 bool",
    "H": "float16 bfloat16 uint16 int16",
    "I": "int32 uint32",
    "L": "int64 uint64",
}
"""What pointers of the kernels' parameters may be given: letters of `Function.codes`."""


class EmulationError(AssertionError):
    """A kernel or its wrapper did what a GPU would not forgive."""


class Asked(NamedTuple):
    """A kernel that was asked for."""

    source: str
    name: str
    defines: tuple[str, ...]


class Function(NamedTuple):
    """A compiled kernel; `codes` says a letter per parameter (`emulator.h`), `sizes` its bytes."""

    asked: Asked
    call: Any
    codes: str
    sizes: tuple[int, ...]


class Memory:
    """One allocation, full of NaN, with a guard on both sides; full of NaN again when it goes."""

    def __init__(self, nbytes: int) -> None:
        self.raw: npt.NDArray[np.uint8] = np.full(nbytes + 3 * GUARD, 0xFF, np.uint8)
        self.start = GUARD + -(self.raw.ctypes.data + GUARD) % GUARD
        self.nbytes = nbytes
        self.ptr = self.raw.ctypes.data + self.start

    def intact(self) -> bool:
        """Whether nobody wrote to the guards."""
        end = self.start + self.nbytes
        return self.raw[self.start - GUARD : self.start].tobytes() == _NAN == self.raw[end : end + GUARD].tobytes()

    def __del__(self) -> None:
        self.raw.fill(0xFF)


class EmulatedDevice:
    """`dcnr.backends.cupy.device.Device` on the CPU."""

    name = "emulated GPU"

    def __init__(self, capability: int = 90, *, reverse: bool = False, multiprocessors: int = 4, kernels: Path = KERNELS) -> None:
        self._capability, self._reverse, self._multiprocessors, self._sources = capability, reverse, multiprocessors, kernels
        self._live: weakref.WeakSet[Memory] = weakref.WeakSet()
        self._kernels: dict[Asked, Function] = {}
        self._constants = Constants()
        self._packer, self._lock = ArgumentPacker(), threading.RLock()
        self._recording: list[Callable[[], None]] | None = None
        self.asked: set[Asked] = set()
        """Every kernel that was asked for."""
        self.launched: list[str] = []
        """Every kernel and product that ran, in order."""
        self.uploads = self.fetches = self.waits = 0
        """Copies from and to the host, and how often the host waited."""

    @property
    def capability(self) -> int:
        """As given."""
        return self._capability

    @property
    def multiprocessors(self) -> int:
        """As given."""
        return self._multiprocessors

    # -- memory -------------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
        """Full of NaN."""
        array = DeviceArray(0, tuple(int(extent) for extent in shape), np.dtype(dtype), None)
        memory = Memory(array.nbytes)
        self._live.add(memory)
        array.ptr, array.owner = memory.ptr, memory
        return array

    def upload(self, into: DeviceArray, host: HostArray) -> None:
        """At once."""
        self.uploads += 1
        if self._recording is not None:
            raise EmulationError("an upload cannot be recorded")
        if host.dtype != into.dtype or host.size != into.size:
            raise EmulationError(f"upload of {host.dtype} {host.shape} into {into.dtype} {into.shape}")
        view(into)[...] = host.reshape(into.shape)

    def fetch(self, arrays: Sequence[DeviceArray]) -> Fetched:
        """At once."""
        self.fetches += 1
        if self._recording is not None:
            raise EmulationError("a fetch cannot be recorded")
        return Fetched(self, [view(array).copy() for array in arrays])

    def copy(self, into: DeviceArray, source: DeviceArray) -> None:
        """The same number of bytes."""
        if into.nbytes != source.nbytes:
            raise EmulationError(f"copy of {source.nbytes} bytes into {into.nbytes}")
        self._issue("copy", partial(_copy, into, source))

    def clear(self, into: DeviceArray) -> None:
        """All bytes zero."""
        self._issue("clear", partial(_clear, into))

    def constant(self, key: Hashable, make: Callable[[], HostArray]) -> DeviceArray:
        """What is recorded keeps it by itself."""
        with self._lock:
            return self._constants.get(key, lambda: put(self, make()))

    def memory(self) -> DeviceMemory:
        """What live arrays hold."""
        return DeviceMemory(TOTAL, sum(memory.nbytes for memory in self._live))

    # -- work ---------------------------------------------------------------------------------------------------------

    def kernel(self, source: str, name: str, *defines: str) -> Function:
        """Compiled at first use; other processes' builds are used too."""
        asked = Asked(source, name, defines)
        if asked not in self._kernels:
            self.asked.add(asked)
            self._kernels[asked] = _load(self._sources, asked)
        return self._kernels[asked]

    def launch(self, kernel: Function, grid: tuple[int, int], block: int, args: Sequence[Argument], shared: int = 0) -> None:
        """Every block, one after the other."""
        where = f"{kernel.asked.source}.{kernel.asked.name}"
        limit = max(bytes_ for capability, bytes_ in MAX_DYNAMIC_SHARED.items() if capability <= self._capability)
        if not (0 < grid[0] < 2**31 and 0 < grid[1] < 2**16 and 0 < block <= 1024 and 0 <= shared <= limit):
            raise EmulationError(f"{where}: grid {grid}, block {block}, {shared} bytes of shared memory")
        if len(args) != len(kernel.codes):
            raise EmulationError(f"{where} takes {len(kernel.codes)} arguments, not {len(args)}")
        for index, (arg, code, size) in enumerate(zip(args, kernel.codes, kernel.sizes, strict=True)):
            _check(f"{where}, argument {index}", arg, code, size)
        self._issue(where, partial(self._run, kernel, (*grid, block, shared, int(self._reverse)), tuple(args)))

    def _run(self, kernel: Function, how: tuple[int, ...], args: Sequence[Argument]) -> None:
        message = ctypes.create_string_buffer(600)
        if kernel.call((ctypes.c_int * 5)(*how), ctypes.c_void_p(self._packer.pack(args)), message, 600):
            raise EmulationError(f"{kernel.asked.source}.cu {' '.join(kernel.asked.defines)}: {message.value.decode()}")
        for memory in list(self._live):
            if not memory.intact():
                raise EmulationError(f"{kernel.asked.source}.{kernel.asked.name} wrote outside of an array of {memory.nbytes} bytes")

    def product(self, kind: Product, a: DeviceArray, b: DeviceArray, out: DeviceArray, bias: DeviceArray | None = None) -> None:
        """By NumPy, float32, rounded once."""
        m, k = reversed(a.shape) if kind.transpose_a else a.shape
        k_b, n = reversed(b.shape) if kind.transpose_b else b.shape
        if k != k_b or out.shape != (m, n) or a.dtype != b.dtype or out.dtype not in (a.dtype, np.dtype(np.float32)):
            raise EmulationError(f"product {kind} of {a.dtype}{a.shape} {b.dtype}{b.shape} into {out.dtype}{out.shape}")
        if bias is not None and (bias.shape != (n,) or bias.dtype != out.dtype):
            raise EmulationError(f"product with a bias {bias.dtype}{bias.shape} into {out.dtype}{out.shape}")
        self._issue("product", partial(_product, kind, a, b, out, bias))

    def tensor_map(self, array: DeviceArray, dims: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> bytes:
        """`emulator::TensorMap`, with the hardware's rules checked."""
        size = array.dtype.itemsize
        missing = 4 - len(dims)
        if missing < 0 or len(strides) != len(dims) - 1 or len(box) != len(dims):
            raise EmulationError(f"tensor map with extents {dims}, strides {strides}, box {box}")
        if array.ptr % 16 or any(stride % 16 for stride in strides) or box[0] * size > 128 or any(not 0 < extent <= 256 for extent in box):
            raise EmulationError(f"tensor map of {array.ptr:#x} with strides {strides}, box {box}: not as the hardware takes it")
        reach = sum((extent - 1) * stride for extent, stride in zip(dims, (size, *strides), strict=True)) + size
        if reach > array.nbytes:
            raise EmulationError(f"tensor map reaches {reach} bytes into an array of {array.nbytes}")
        extents, boxes = (*dims, *[1] * missing), (*box, *[1] * missing)
        return struct.pack("9Q5I36x", array.ptr, *extents, size, *strides, *[0] * missing, *boxes, size)

    def ipc(self) -> None:
        """Nobody opens this memory."""

    def recording(self, beside: Recording | None = None) -> EmulatedRecording:
        """A fresh one."""
        return EmulatedRecording(self)

    def capture(self, work: Callable[[], None]) -> list[Callable[[], None]]:
        """What `work` issues, which is not done."""
        steps: list[Callable[[], None]] = []
        with self._lock:
            self._recording = steps
            try:
                work()
            finally:
                self._recording = None
        return steps

    def synchronize(self) -> None:
        """Nothing is ever under way; counted."""
        self.waits += 1

    def _issue(self, what: str, step: Callable[[], None]) -> None:
        with self._lock:
            self.launched.append(what)
            if self._recording is None:
                step()
            else:
                self._recording.append(step)


class Fetched:
    """A copy that is there."""

    def __init__(self, device: EmulatedDevice, arrays: list[HostArray]) -> None:
        self._device, self._arrays = device, arrays

    def wait(self) -> list[HostArray]:
        """At once; counted."""
        self._device.waits += 1
        return self._arrays


class EmulatedRecording:
    """The work itself, then what it issued with the arguments of then."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._ran = False
        self._steps: list[Callable[[], None]] | None = None

    def run(self, work: Callable[[], None]) -> None:
        """Call it; the second time note it; from then on do what was noted."""
        if not self._ran:
            work()
            self._ran = True
            return
        if self._steps is None:
            self._steps = self._device.capture(work)
        for step in self._steps:
            step()


def put(device: EmulatedDevice, host: HostArray) -> DeviceArray:
    """A copy of `host`, of the same dtype."""
    array = device.empty(host.shape, host.dtype)
    device.upload(array, host)
    return array


def get(array: DeviceArray) -> HostArray:
    """A copy of an array."""
    return view(array).copy()


def view(array: DeviceArray) -> HostArray:
    """The memory of an array as NumPy sees it."""
    if array.nbytes == 0:
        return np.empty(array.shape, array.dtype)
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(array.ptr))
    return raw.view(array.dtype).reshape(array.shape)


def _copy(into: DeviceArray, source: DeviceArray) -> None:
    ctypes.memmove(into.ptr, source.ptr, into.nbytes)


def _clear(into: DeviceArray) -> None:
    ctypes.memset(into.ptr, 0, into.nbytes)


def _product(kind: Product, a: DeviceArray, b: DeviceArray, out: DeviceArray, bias: DeviceArray | None) -> None:
    left, right, target = (view(x).astype(np.float32) for x in (a, b, out))
    with np.errstate(all="ignore"):
        sums = (left.T if kind.transpose_a else left) @ (right.T if kind.transpose_b else right)
        if kind.accumulate:
            sums += target
        if bias is not None:
            sums += view(bias).astype(np.float32)
        view(out)[...] = sums.astype(out.dtype)


def _check(where: str, arg: Argument, code: str, size: int) -> None:
    """Raises `EmulationError` if `arg` is not what the kernel declares: a GPU would take it, and compute nonsense."""
    if isinstance(arg, DeviceArray):
        memory = arg.owner
        if not (isinstance(memory, Memory) and memory.ptr <= arg.ptr and arg.ptr + arg.nbytes <= memory.ptr + memory.nbytes):
            raise EmulationError(f"{where}: the array lies outside of its memory")
        fits = code == "P" or arg.dtype.name in _KINDS.get(code, "").split()
    elif arg is None:
        fits = code in _POINTERS
    elif isinstance(arg, bytes):
        fits = code == "s" and len(arg) == size
    elif isinstance(arg, np.generic):
        fits = code in ("fd" if arg.dtype.kind == "f" else "hil") and arg.itemsize == size
    else:
        fits = code == ("f" if isinstance(arg, float) else "i")
    if not fits:
        told = f"an array of {arg.dtype}" if isinstance(arg, DeviceArray) else repr(arg)
        raise EmulationError(f"{where}: {told} for a parameter of kind {code} with {size} bytes")


def _load(sources: Path, asked: Asked) -> Function:
    path = library(sources / f"{asked.source}.cu", asked.defines)
    loaded = ctypes.PyDLL(str(path))  # holds the interpreter: the emulator has one machine
    try:
        call, describe = loaded[f"launch_{asked.name}"], loaded[f"describe_{asked.name}"]
    except AttributeError:
        raise EmulationError(f"{asked.source}.cu exports no {asked.name} with {asked.defines}") from None
    codes, sizes = ctypes.create_string_buffer(64), (ctypes.c_int * 64)()
    describe(codes, sizes)
    return Function(asked, call, codes.value.decode(), tuple(sizes[: len(codes.value)]))
