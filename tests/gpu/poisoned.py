"""Devices on the first GPU that show what an ordinary one forgives: numbers left out, read before they were written, or written too far."""

from __future__ import annotations

import math

from cupy.cuda import Memory, runtime

from dcnr.backends.cupy.array import DeviceArray, Dtype
from dcnr.backends.cupy.cuda import CudaDevice


class PoisonedDevice(CudaDevice):
    """All bytes of a new array are 0xff, which is NaN in every precision."""

    def empty(self, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
        """Written on the stream of all work."""
        return self.poisoned(super().empty(shape, dtype))

    def poisoned(self, array: DeviceArray) -> DeviceArray:
        """The array, full of NaN."""
        if array.nbytes:
            with self._clearing:
                runtime.memsetAsync(array.ptr, 0xFF, array.nbytes, self._queue)
        return array


class ExactDevice(PoisonedDevice):
    """Every array is an allocation of its own, of just its size, so that compute-sanitizer knows where it ends."""

    def empty(self, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
        """From the driver, not from a pool."""
        memory = Memory(max(1, math.prod(shape) * dtype.itemsize))
        return self.poisoned(DeviceArray(memory.ptr, shape, dtype, memory))
