"""A device that computes nothing and remembers which kernels were asked for, so that wrappers can be run at any size.

Addresses are made up, aligned as a GPU's; what is fetched is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from dcnr.backends.base import DeviceMemory, HostArray, Recording
from dcnr.backends.cupy.array import DeviceArray, Dtype
from dcnr.backends.cupy.device import Argument, Product


class Variant(NamedTuple):
    """One compilation."""

    source: str
    defines: tuple[str, ...]


class DryKernel(NamedTuple):
    """A function of a variant."""

    variant: Variant
    name: str


class DryDevice:
    """`dcnr.backends.cupy.device.Device` without a device."""

    name = "no GPU"
    multiprocessors = 132

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.launched: dict[DryKernel, int] = {}
        """The kernels that were asked for, with the threads of the largest block."""
        self._next = 1 << 40

    def empty(self, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
        """An address that nothing else has."""
        array = DeviceArray(self._next, tuple(shape), np.dtype(dtype), self)
        self._next += -(-array.nbytes // 256) * 256 + 256
        return array

    def upload(self, into: DeviceArray, host: HostArray) -> None:
        """Nothing."""

    def fetch(self, arrays: Sequence[DeviceArray]) -> Zeros:
        """Zeros."""
        return Zeros([np.zeros(array.shape, array.dtype) for array in arrays])

    def copy(self, into: DeviceArray, source: DeviceArray) -> None:
        """Nothing."""

    def clear(self, into: DeviceArray) -> None:
        """Nothing."""

    def constant(self, key: Hashable, make: Callable[[], HostArray]) -> DeviceArray:
        """Of the shape and dtype of what `make` gives."""
        host = make()
        return self.empty(host.shape, host.dtype)

    def memory(self) -> DeviceMemory:
        """Plenty."""
        return DeviceMemory(1 << 40, 0)

    def kernel(self, source: str, name: str, *defines: str) -> DryKernel:
        """Remembered."""
        found = DryKernel(Variant(source, tuple(sorted(defines))), name)
        self.launched.setdefault(found, 0)
        return found

    def launch(self, kernel: DryKernel, grid: tuple[int, int], block: int, args: Sequence[Argument], shared: int = 0) -> None:
        """Nothing, but a launch that no GPU takes is an error."""
        assert 0 < grid[0] < 2**31, f"{kernel}: grid {grid}"
        assert 0 < grid[1] < 2**16, f"{kernel}: grid {grid}"
        assert 0 < block <= 1024, f"{kernel}: block {block}"
        self.launched[kernel] = max(block, self.launched[kernel])

    def product(self, kind: Product, a: DeviceArray, b: DeviceArray, out: DeviceArray, bias: DeviceArray | None = None) -> None:
        """Nothing."""

    def tensor_map(self, array: DeviceArray, dims: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> bytes:
        """As large as one."""
        return bytes(128)

    def ipc(self) -> None:
        """Nobody opens this memory."""

    def recording(self, beside: Recording | None = None) -> DryRecording:
        """One that always runs its work."""
        return DryRecording()

    def synchronize(self) -> None:
        """Nothing is under way."""


class Zeros:
    """What a fetch gives."""

    def __init__(self, arrays: list[HostArray]) -> None:
        self._arrays = arrays

    def wait(self) -> list[HostArray]:
        """At once."""
        return self._arrays


class DryRecording:
    """Records nothing."""

    def run(self, work: Callable[[], None]) -> None:
        """Every time."""
        work()
