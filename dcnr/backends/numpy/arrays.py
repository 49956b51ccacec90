"""Making, moving, joining and cutting arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import psutil

from dcnr.backends.base import DeviceMemory, HostArray, Precision, is_integer
from dcnr.backends.dtypes import dtype_of
from dcnr.backends.numpy.wide import like, quiet, wide


class ArrayOps:
    """The device is the host."""

    def memory(self) -> DeviceMemory:
        """The machine's memory, and this process's resident part."""
        return DeviceMemory(int(psutil.virtual_memory().total), int(psutil.Process().memory_info().rss))

    @quiet
    def from_host(self, x: HostArray, precision: Precision | None = None) -> HostArray:
        """A copy; integers become int64, floats `precision` if one is given."""
        if is_integer(x):
            return np.array(x, dtype=np.int64)
        return np.array(x, dtype=None if precision is None else dtype_of(precision))

    def to_host(self, x: HostArray) -> HostArray:
        """The array itself."""
        return x

    def empty(self, shape: tuple[int, ...], precision: Precision) -> HostArray:
        """Uninitialised."""
        return np.empty(shape, dtype_of(precision))

    def zeros(self, shape: tuple[int, ...], precision: Precision) -> HostArray:
        """All zero."""
        return np.zeros(shape, dtype_of(precision))

    @quiet
    def cast(self, x: HostArray, precision: Precision) -> HostArray:
        """`x` itself if it has that dtype."""
        return x.astype(dtype_of(precision), copy=False)

    @quiet
    def copy_into(self, into: HostArray, x: HostArray) -> None:
        """into[...] = x."""
        into[...] = x

    def concatenate(self, parts: Sequence[HostArray], axis: int) -> HostArray:
        """All `parts` along `axis`."""
        return np.concatenate(parts, axis=axis)

    def split(self, x: HostArray, sizes: Sequence[int], axis: int) -> tuple[HostArray, ...]:
        """Contiguous copies of consecutive pieces."""
        cuts = list(accumulate(sizes))[:-1]
        return tuple(np.array(piece, order="C") for piece in np.split(x, cuts, axis=axis))

    @quiet
    def add(self, terms: Sequence[HostArray]) -> HostArray:
        """Left to right in float32, rounded once."""
        total = wide(terms[0])
        for term in terms[1:]:
            total = total + wide(term)
        return like(total, terms[0])

    @quiet
    def causal_mask(self, x: HostArray, fill: float) -> HostArray:
        """x[..., i, j] where j <= i, else `fill` (infinite, if the dtype does not reach it)."""
        lower = np.tri(x.shape[-2], x.shape[-1], dtype=bool)
        return np.where(lower, x, np.asarray(fill).astype(x.dtype))
