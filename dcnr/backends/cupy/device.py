"""What the operations of this backend ask of a device. `cuda.CudaDevice` is a GPU; the tests emulate one.

Rule 1: everything is issued to one stream, in order; nothing waits for the host.
Rule 2: memory comes from a pool and returns to it when the last reference goes. Since the stream is ordered, it may be used again at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from dcnr.backends.base import DeviceMemory, Fetch, HostArray, Recording
from dcnr.backends.cupy.array import DeviceArray, Dtype

Kernel = Any
"""A compiled function, as `Device.kernel` gives it."""

Argument = DeviceArray | np.generic | int | float | bytes | None
"""An array (its address), None (a null pointer), int (32-bit), float (float32), a NumPy scalar as it is, bytes (a struct by value)."""

MAX_SHARED = 48 << 10
"""Bytes of shared memory that a block gets without asking."""


class Product(NamedTuple):
    """out [M, N] = a b (+ out), with fp32 sums. a is [M, K] (or [K, M] transposed), b is [K, N] (or [N, K] transposed), row-major."""

    transpose_a: bool
    transpose_b: bool
    accumulate: bool = False


class Device(Protocol):
    """One stream of one device."""

    @property
    def name(self) -> str:
        """For people: `NVIDIA H200 (0)`."""
        ...

    @property
    def capability(self) -> int:
        """Compute capability times ten: 80, 90, …"""
        ...

    @property
    def multiprocessors(self) -> int:
        """How many."""
        ...

    # -- memory -------------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
        """Uninitialised, aligned to 256 bytes. Raises `BackendUnavailable` when the device has no room, with the numbers."""
        ...

    def upload(self, into: DeviceArray, host: HostArray) -> None:
        """Copy `host` (same dtype and size) to the device; `host` may change as soon as this returns."""
        ...

    def fetch(self, arrays: Sequence[DeviceArray]) -> Fetch:
        """Begin to copy to pinned host memory on a stream of its own, behind what was issued so far."""
        ...

    def copy(self, into: DeviceArray, source: DeviceArray) -> None:
        """The same number of bytes, device to device."""
        ...

    def clear(self, into: DeviceArray) -> None:
        """All bytes zero."""
        ...

    def constant(self, key: Hashable, make: Callable[[], HostArray]) -> DeviceArray:
        """An array that never changes, what `make` gave when `key` was first asked for; kept while it is in use (see `constants`)."""
        ...

    def memory(self) -> DeviceMemory:
        """Of the whole device, and held by this process."""
        ...

    # -- work ---------------------------------------------------------------------------------------------------------

    def kernel(self, source: str, name: str, *defines: str) -> Kernel:
        """Function `name` of `<source>.cu` compiled with `-D` each of `defines`; kept."""
        ...

    def launch(self, kernel: Kernel, grid: tuple[int, int], block: int, args: Sequence[Argument], shared: int = 0) -> None:
        """Issue `kernel` over grid[0] x grid[1] blocks of `block` threads with `shared` bytes of dynamic shared memory."""
        ...

    def product(self, kind: Product, a: DeviceArray, b: DeviceArray, out: DeviceArray, bias: DeviceArray | None = None) -> None:
        """a and b of one dtype (float16, bfloat16, float32); out of that dtype or float32. `bias` [N], of out's dtype, joins every row."""
        ...

    def tensor_map(self, array: DeviceArray, dims: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> bytes:
        """A TMA descriptor with the 128-byte swizzle: extents and box innermost first, `strides` in bytes of all axes but the innermost."""
        ...

    def ipc(self) -> Any | None:
        """What `Backend.ipc` asks for; None where other processes cannot open memory."""
        ...

    def recording(self, beside: Recording | None = None) -> Recording:
        """A fresh one; see `Backend.recording`."""
        ...

    def synchronize(self) -> None:
        """Wait until everything issued so far is done."""
        ...


@cache
def storage(dtype: Dtype) -> str:
    """The define that compiles a kernel for arrays of `dtype`."""
    return _STORAGE[dtype.name]


@cache
def parameter(dtype: Dtype) -> str:
    """The define for gains and biases of `dtype`, which may be another one (`group.cuh`)."""
    return _STORAGE[dtype.name].replace("STORAGE", "PARAMETER")


_STORAGE = {"float16": "STORAGE=1", "bfloat16": "STORAGE=2", "float32": "STORAGE=3"}


def blocks(count: int, size: int) -> int:
    """How many blocks of `size` cover `count`; at least one."""
    return max(1, -(-count // size))
