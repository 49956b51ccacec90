"""exp and erf against the standard library, in double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dcnr.backends.cpu import functions
from dcnr.backends.cpu.jit import inner
from tests.backends.cpu.pair import Array


@inner
def _exps(x: Array) -> Array:
    y = np.empty_like(x)
    for i in range(x.size):
        y[i] = functions.exp(x[i])
    return y


@inner
def _erfs(x: Array) -> Array:
    y = np.empty_like(x)
    for i in range(x.size):
        y[i] = functions.erf(x[i])
    return y


def test_exp() -> None:
    """Relative error below 2.5e-7 over all results that are normal numbers."""
    x = np.linspace(-87.3, 88.7, 200_001, dtype=np.float32)
    wanted = np.exp(x.astype(np.float64))
    assert np.max(np.abs(_exps(x) - wanted) / wanted) < 2.5e-7


def test_exp_at_the_ends() -> None:
    """Zero below, infinity above, NaN for NaN."""
    x = np.array([-np.inf, -1e30, -88.0, 0.0, 89.0, 1e30, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(_exps(x), np.array([0, 0, 0, 1, np.inf, np.inf, np.inf, np.nan], np.float32))


def test_erf() -> None:
    """Absolute error below 4e-7; exact far out; NaN for NaN."""
    x = np.linspace(-6, 6, 100_001, dtype=np.float32)
    wanted = np.array([math.erf(value) for value in x.tolist()])
    assert np.max(np.abs(_erfs(x) - wanted)) < 4e-7
    far = np.array([-np.inf, -4, 4, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(_erfs(far), np.array([-1, -1, 1, 1, np.nan], np.float32))


@pytest.mark.parametrize("size", [1, 7, 33, 127])
def test_largest(size: int) -> None:
    """Of either sign, with infinities."""
    draw = np.random.default_rng(size)
    for _ in range(20):
        x = draw.normal(size=size).astype(np.float32) - 1
        assert functions.largest(x) == x.max()
        x[draw.integers(size)] = -np.inf
        assert functions.largest(x) == x.max()
        x[draw.integers(size)] = np.inf
        assert functions.largest(x) == np.inf
