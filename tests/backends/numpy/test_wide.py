"""How 16-bit storage meets float32 arithmetic."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from dcnr.backends.numpy.wide import like, quiet, wide, write


def test_16_bit_becomes_float32_and_the_rest_stays() -> None:
    """float32 and float64 are not copied."""
    for dtype in (np.float16, ml_dtypes.bfloat16):
        assert wide(np.ones(2, dtype)).dtype == np.float32
    for dtype in (np.float32, np.float64):
        x = np.ones(2, dtype)
        assert wide(x) is x


def test_rounding_is_to_nearest_even() -> None:
    """Once, at the end."""
    halves = np.array([1 + 2**-11, 1 + 3 * 2**-11], np.float32)
    assert like(halves, np.ones(1, np.float16)).tolist() == [1.0, 1 + 4 * 2**-11]


def test_accumulators_are_written_then_added_to() -> None:
    """Garbage of the step before does not survive, not even NaN."""
    into = np.array([np.nan, 1.0])
    write(into, np.array([1.0, 2.0]), accumulate=False)
    assert into.tolist() == [1, 2]
    write(into, np.array([1.0, 2.0]), accumulate=True)
    assert into.tolist() == [2, 4]


def test_overflow_is_a_result() -> None:
    """Inside `quiet` there is no warning, outside there is."""

    def overflow() -> float:
        return float(np.float32(3e38) * np.float32(10))

    assert quiet(overflow)() == np.inf
    with pytest.warns(RuntimeWarning, match="overflow"):
        overflow()
