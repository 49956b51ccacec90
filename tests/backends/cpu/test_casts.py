"""16-bit storage, compared bit by bit with numpy and ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dcnr.backends.base import Precision
from tests.backends.cpu.pair import CPU, Array

LOW: list[tuple[Precision, Any]] = [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)]


@pytest.mark.parametrize(("precision", "dtype"), LOW)
def test_all_values_widen_exactly(precision: Precision, dtype: Any) -> None:
    """All 65,536 of them: numbers, subnormals, infinities, NaN."""
    every = np.arange(65536, dtype=np.uint16).view(dtype)
    actual, wanted = CPU.cast(every, "float32"), every.astype(np.float32)
    numbers = ~np.isnan(wanted)
    np.testing.assert_array_equal(actual.view(np.uint32)[numbers], wanted.view(np.uint32)[numbers])
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(wanted))


@pytest.mark.parametrize(("precision", "dtype"), LOW)
def test_all_values_come_back(precision: Precision, dtype: Any) -> None:
    """Narrowing undoes widening; NaN stays NaN of its sign."""
    every = np.arange(65536, dtype=np.uint16).view(dtype)
    back = CPU.cast(CPU.cast(every, "float32"), precision)
    numbers = ~np.isnan(every.astype(np.float32))
    np.testing.assert_array_equal(back.view(np.uint16)[numbers], every.view(np.uint16)[numbers])
    assert np.isnan(back[~numbers].astype(np.float32)).all()


@pytest.mark.parametrize(("precision", "dtype"), LOW)
def test_rounding_is_to_nearest_even(precision: Precision, dtype: Any) -> None:
    """Around every 16-bit number: on it, half way to the next, and one float32 step to either side of that; overflow too."""
    every = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32)
    every = every[np.isfinite(every)]
    up = np.sort(every)
    half = ((up[1:].astype(np.float64) + up[:-1]) / 2).astype(np.float32)
    x = np.concatenate([half, np.nextafter(half, np.float32(np.inf)), np.nextafter(half, np.float32(-np.inf)), *_beyond()])
    with np.errstate(over="ignore"):
        wanted = x.astype(dtype)
    np.testing.assert_array_equal(CPU.cast(x, precision).view(np.uint16), wanted.view(np.uint16))


def _beyond() -> list[Array]:
    random = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint64).astype(np.uint32).view(np.float32)
    edge = np.array([65504, 65519.99, 65520, 1e30, 3.4e38, 1e-45, -1e-45, 2**-25, -(2**-25), 2**-24], np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf], np.float32)
    return [random[~np.isnan(random)], edge, special]


def test_nan_in_bfloat16_has_the_bits_of_ml_dtypes() -> None:
    """Whatever its payload, also one that would vanish with the low half."""
    nans = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF, 0x7FABCDEF], np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        wanted = nans.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(CPU.cast(nans, "bfloat16").view(np.uint16), wanted.view(np.uint16))


def test_a_cast_to_the_same_type_is_the_array_itself() -> None:
    """No copy."""
    x = CPU.zeros((7,), "bfloat16")
    assert CPU.cast(x, "bfloat16") is x


@pytest.mark.parametrize(("precision", "dtype"), LOW)
def test_copy_into_rounds(precision: Precision, dtype: Any) -> None:
    """Into a view as well."""
    x = np.linspace(-3, 3, 33, dtype=np.float32)
    into = CPU.zeros((33, 2), precision)
    CPU.copy_into(into[:, 1], x)
    np.testing.assert_array_equal(into[:, 1], x.astype(dtype))
    assert not into[:, 0].any()
    whole = CPU.zeros((33,), precision)
    CPU.copy_into(whole, x)
    np.testing.assert_array_equal(whole, x.astype(dtype))
    back = CPU.zeros((33,), "float32")
    CPU.copy_into(back, whole)
    np.testing.assert_array_equal(back, x.astype(dtype).astype(np.float32))
