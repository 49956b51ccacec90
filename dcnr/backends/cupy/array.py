"""A contiguous piece of device memory with a shape and a dtype.

Deliberately small: operations see an address, so the same wrappers run on a GPU and in the emulator of the tests.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Dtype = np.dtype[Any]
UINT8, UINT32, INT32, INT64, FLOAT32, FLOAT64 = (np.dtype(kind) for kind in ("u1", "u4", "i4", "i8", "f4", "f8"))


class DeviceArray:
    """C-contiguous. `owner` keeps the memory alive; it returns to the pool when the last array that has it goes."""

    __slots__ = ("dtype", "owner", "ptr", "shape")

    def __init__(self, ptr: int, shape: tuple[int, ...], dtype: Dtype, owner: object) -> None:
        self.ptr = ptr
        self.shape = shape
        self.dtype = dtype
        self.owner = owner

    @property
    def ndim(self) -> int:
        """Axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def reshape(self, *extents: int | tuple[int, ...]) -> DeviceArray:
        """The same memory; one extent may be -1, and a tuple may stand for all. Raises `ValueError` if the sizes differ."""
        shape = tuple(extent for part in extents for extent in (part if isinstance(part, tuple) else (part,)))
        known = math.prod(extent for extent in shape if extent != -1)
        if -1 in shape and known:
            shape = tuple(self.size // known if extent == -1 else extent for extent in shape)
        if math.prod(shape) != self.size:
            raise ValueError(f"cannot see an array of shape {self.shape} as {shape}")
        return DeviceArray(self.ptr, shape, self.dtype, self.owner)

    def __getitem__(self, index: int | slice) -> DeviceArray:
        """One or several consecutive entries of the first axis; the same memory."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        if isinstance(index, slice):
            start, stop, stride = index.indices(self.shape[0])
            if stride != 1:
                raise ValueError("a device array is only cut into consecutive rows")
            return DeviceArray(self.ptr + start * row, (max(0, stop - start), *self.shape[1:]), self.dtype, self.owner)
        return DeviceArray(self.ptr + range(self.shape[0])[index] * row, self.shape[1:], self.dtype, self.owner)
