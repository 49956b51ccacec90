"""Masks and dropout: bit-equal to the definition, wherever an array starts."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from dcnr.backends.base import HostArray, Philox
from dcnr.backends.cupy import random
from dcnr.backends.cupy.array import Dtype
from dcnr.backends.dtypes import precision_of
from dcnr.backends.load import load_backend
from tests.backends.cupy.emulator.device import EmulatedDevice, get, put, view
from tests.tolerances import assert_close

NUMPY = load_backend("numpy")
STORED = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
SEED = 0x123456789ABCDEF


def draw(*shape: int, dtype: Dtype = STORED[0], seed: int = 0) -> HostArray:
    """Normal numbers that depend on the shape and the seed alone."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def both(device: EmulatedDevice, offset: int, step: int = 77, stream: int = 0xDEADBEEF, seed: int = SEED) -> tuple[Philox, Philox]:
    """One generator, as the device and as NumPy take it."""
    return Philox(seed, stream, put(device, np.array(step, np.uint32)), offset), Philox(seed, stream, step, offset)


@pytest.mark.parametrize("offset", [0, 1, 8, 15, 64, 1000, 12345678901, 2**36 - 5])
@pytest.mark.parametrize("size", [1, 7, 33, 127, 64, 1024, 5000])
def test_masks_are_those_of_the_definition(size: int, offset: int) -> None:
    """Eight at a time and one by one, within and across blocks of threads, and where the counter passes 32 bits."""
    device = EmulatedDevice()
    ours, theirs = both(device, offset)
    ones = np.ones(size, np.float32)
    assert np.array_equal(get(random.random_mask(device, put(device, ones), 0.37, ours)), NUMPY.random_mask(ones, 0.37, theirs))


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("shape", [(7, 127), (5, 3, 16)])
def test_dropout(shape: tuple[int, ...], rate: float, dtype: Dtype) -> None:
    """The same bits as the definition; with a residual, but for what a fused multiply and add rounds."""
    device = EmulatedDevice()
    ours, theirs = both(device, 16)
    x, residual = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    assert np.array_equal(get(random.dropout(device, put(device, x), rate, ours)), NUMPY.dropout(x, rate, theirs))
    actual = get(random.dropout(device, put(device, x), rate, ours, put(device, residual)))
    assert_close(actual, NUMPY.dropout(x, rate, theirs, residual), precision_of(dtype))


def test_a_residual_of_another_dtype() -> None:
    """The result has that of x."""
    device = EmulatedDevice()
    ours, theirs = both(device, 0)
    x, residual = draw(7, 16, dtype=STORED[1]), draw(7, 16, seed=1)
    actual = get(random.dropout(device, put(device, x), 0.3, ours, put(device, residual)))
    assert_close(actual, NUMPY.dropout(x, 0.3, theirs, residual), "float16")


def test_rows_from_anywhere() -> None:
    """Cutting a batch into rows is invisible, even where a row starts beside a 16-byte boundary."""
    device = EmulatedDevice()
    x = draw(9, 33, dtype=STORED[1])
    whole = random.dropout(device, put(device, x), 0.3, both(device, 0)[0])
    parts = [random.dropout(device, put(device, x)[a:b], 0.3, both(device, a * 33)[0]) for a, b in ((0, 2), (2, 7), (7, 9))]
    assert np.array_equal(np.concatenate([get(part) for part in parts]), get(whole))


def test_the_step_is_read_on_the_device() -> None:
    """A new number in the same scalar gives the next step's mask, so that a recorded pass stays right."""
    device = EmulatedDevice()
    ours, theirs = both(device, 0, step=1)
    ones = np.ones(512, np.float32)
    for step in (1, 2, 2**32 - 1):
        view(ours.step)[...] = step
        actual = get(random.random_mask(device, put(device, ones), 0.5, ours))
        assert np.array_equal(actual, NUMPY.random_mask(ones, 0.5, theirs._replace(step=step)))


def test_every_key_matters() -> None:
    """Seed (both halves), stream, step and offset each change the mask."""
    device = EmulatedDevice()
    ones = put(device, np.ones(512, np.float32))
    keys = [(0, 3, 2, 1), (0, 3, 2, 1 + 2**32), (0, 3, 2, 2), (0, 3, 3, 1), (0, 4, 2, 1), (512, 3, 2, 1)]
    assert len({get(random.random_mask(device, ones, 0.5, both(device, *key)[0])).tobytes() for key in keys}) == len(keys)


@pytest.mark.parametrize("size", [999, 1000])
def test_a_dropped_nan_is_gone_and_a_kept_one_stays(size: int) -> None:
    """As the definition has it; infinity too."""
    device = EmulatedDevice()
    ours, theirs = both(device, 0)
    x = np.where(np.arange(size) % 2, math.nan, math.inf).astype(np.float32)
    assert np.array_equal(get(random.dropout(device, put(device, x), 0.5, ours)), NUMPY.dropout(x, 0.5, theirs), equal_nan=True)


def test_nothing_is_launched_for_nothing() -> None:
    """An empty array gives an empty array."""
    device = EmulatedDevice()
    assert random.dropout(device, put(device, draw(0, 8)), 0.5, both(device, 0)[0]).shape == (0, 8)
    assert not device.launched
