"""Rotary embedding."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from dcnr.backends.base import HostArray, Rope
from dcnr.backends.cupy import rotary
from dcnr.backends.cupy.array import Dtype
from dcnr.backends.dtypes import precision_of
from dcnr.backends.load import load_backend
from tests.backends.cupy.emulator.device import EmulatedDevice, get, put
from tests.tolerances import assert_close

NUMPY = load_backend("numpy")
STORED = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
ROPE = Rope(10000.0)


def draw(*shape: int, dtype: Dtype = STORED[0]) -> HostArray:
    """Normal numbers that depend on the shape alone."""
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 7, 6), (2, 33, 64), (70, 5, 8), (2, 3, 5, 16), (1, 127, 26)])
def test_pairs_turn(shape: tuple[int, ...], dtype: Dtype, backward: bool) -> None:
    """Widths that fill vectors and that do not, more batch rows than shares, more axes."""
    device = EmulatedDevice()
    x = draw(*shape, dtype=dtype)
    actual = get(rotary.rotate(device, put(device, x), ROPE, backward))
    assert_close(actual, NUMPY.rotate(x, ROPE, backward), precision_of(dtype))


def test_far_positions() -> None:
    """Angles of thousands of turns are as exact as those of the first."""
    device = EmulatedDevice()
    x = draw(1, 20000, 2)
    assert_close(get(rotary.rotate(device, put(device, x), ROPE)), NUMPY.rotate(x, ROPE), "float32")


def test_a_slice_from_anywhere() -> None:
    """Also beside a 16-byte boundary."""
    device = EmulatedDevice()
    x = draw(3, 5, 10, dtype=STORED[1])
    assert_close(get(rotary.rotate(device, put(device, x)[1:], ROPE)), NUMPY.rotate(x[1:], ROPE), "float16")


def test_nothing_is_launched_for_nothing() -> None:
    """An empty array gives an empty array."""
    device = EmulatedDevice()
    assert rotary.rotate(device, put(device, draw(0, 3, 8)), ROPE).shape == (0, 3, 8)
    assert not device.launched
