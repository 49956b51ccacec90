"""Arguments of kernels, packed for `cuLaunchKernel`: a table of addresses of values.

Rule: a launch costs the host one walk over the arguments; what depends on their types alone (offsets, the table) is kept.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from dcnr.backends.cupy.array import DeviceArray
from dcnr.backends.cupy.device import Argument
from dcnr.errors import InvariantError

LIMIT = 4096
"""Bytes that the arguments of one kernel may have together."""

_SCALARS: Mapping[type, str] = MappingProxyType(
    {
        float: "f", int: "i", bool: "i",
        np.float32: "f", np.float64: "d",
        np.int32: "i", np.int64: "q", np.uint16: "H", np.uint32: "I", np.uint64: "Q",
    }
)  # fmt: skip


class ArgumentPacker:
    """One buffer that every launch of a device overwrites: the driver has read it when the launch returns."""

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(LIMIT)
        self._layouts: dict[str, tuple[Callable[..., None], Any, int]] = {}

    def pack(self, args: Sequence[Argument]) -> int:
        """Address of the table, valid until the next call. Raises `InvariantError` for what no kernel takes."""
        codes: list[str] = []
        values: list[Any] = []
        for arg in args:
            kind = type(arg)
            if kind is DeviceArray:
                codes.append("Q")
                values.append(arg.ptr)  # type: ignore[union-attr]
            elif arg is None:
                codes.append("Q")
                values.append(0)
            elif kind is bytes:
                codes.append(f"{len(arg)}s")  # type: ignore[arg-type]
                values.append(arg)
            else:
                codes.append(_SCALARS.get(kind, "?"))
                values.append(arg)
        layout = self._layouts.get(key := "".join(codes)) or self._lay_out(key, codes)
        try:
            layout[0](self._buffer, 0, *values)
        except struct.error as error:
            raise InvariantError(f"arguments {values} do not fit a kernel that takes {key}: {error}") from error
        except OverflowError:  # a float beyond float32, which NumPy would round to infinity
            layout[0](self._buffer, 0, *(_rounded(value) if type(value) is float else value for value in values))
        return layout[2]

    def _lay_out(self, key: str, codes: Sequence[str]) -> tuple[Callable[..., None], Any, int]:
        """C alignment for everything but structs: the driver copies those from wherever they start."""
        if "?" in codes:
            raise InvariantError(f"argument {codes.index('?')} of a kernel is of a type that kernels do not take")
        ends = [struct.calcsize("".join(codes[: at + 1])) for at in range(len(codes))]
        if ends and ends[-1] > LIMIT:
            raise InvariantError(f"the arguments of a kernel take {ends[-1]} of {LIMIT} bytes")
        start = ctypes.addressof(self._buffer)
        table = (ctypes.c_void_p * len(codes))(*(start + end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True)))
        self._layouts[key] = struct.Struct(key).pack_into, table, ctypes.addressof(table)
        return self._layouts[key]


def _rounded(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))
