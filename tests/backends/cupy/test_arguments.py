"""Arguments of kernels lie where the table says, each as its parameter wants it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from dcnr.backends.cupy.arguments import LIMIT, ArgumentPacker
from dcnr.backends.cupy.array import DeviceArray
from dcnr.errors import InvariantError

ARRAY = DeviceArray(0x7F00_1234_5600, (3,), np.dtype(np.float32), None)


def read(packer: ArgumentPacker, args: list[Any], kinds: list[Any]) -> list[Any]:
    """What a driver would copy for parameters of those C types."""
    table = (ctypes.c_void_p * len(args)).from_address(packer.pack(args))
    return [kind.from_address(place) for kind, place in zip(kinds, table, strict=True)]


def test_every_type_arrives() -> None:
    """Arrays, null pointers, ints of 32 bits, floats, NumPy scalars as they are, structs."""
    numpy_scalars = [np.float32(2), np.float64(3), np.int64(-4), np.uint64(2**63), np.uint16(9)]
    args = [ARRAY, None, 7, -1, np.uint32(2**32 - 1), True, 0.5, *numpy_scalars, b"struct!", 5]
    kinds = [
        ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_uint32, ctypes.c_int, ctypes.c_float, ctypes.c_float,
        ctypes.c_double, ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint16, ctypes.c_char * 7, ctypes.c_int,
    ]  # fmt: skip
    packer = ArgumentPacker()
    found = [one.value for one in read(packer, args, kinds)]
    assert found == [ARRAY.ptr, 0, 7, -1, 2**32 - 1, 1, 0.5, 2.0, 3.0, -4, 2**63, 9, b"struct!", 5]


def test_the_same_pattern_uses_the_same_table() -> None:
    """With the new values."""
    packer = ArgumentPacker()
    first = packer.pack([ARRAY, 1])
    assert packer.pack([0.5]) != first
    assert packer.pack([ARRAY, 2]) == first
    assert read(packer, [ARRAY, 2], [ctypes.c_uint64, ctypes.c_int])[1].value == 2


def test_floats_are_rounded_to_float32() -> None:
    """As NumPy does: what is too large becomes infinite, with its sign."""
    args = [1e39, -1e39, 0.1, 3.4028234e38, np.float64(1e39), 7]
    kinds = [ctypes.c_float] * 4 + [ctypes.c_double, ctypes.c_int]
    packer = ArgumentPacker()
    found = [one.value for one in read(packer, args, kinds)]
    assert found == [float("inf"), -float("inf"), np.float32(0.1), np.float32(3.4028234e38), 1e39, 7]


@pytest.mark.parametrize("args", [["text"], [np.array([1])], [bytes(LIMIT), 1], [1 + 2j], [2**31], [-(2**31) - 1]], ids=str)
def test_what_no_kernel_takes_is_a_bug(args: list[Any]) -> None:
    """Other types, numbers beyond 32 bits, and too much of it."""
    with pytest.raises(InvariantError, match="kernel"):
        ArgumentPacker().pack(args)
