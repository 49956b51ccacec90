"""Activations, dropout and random masks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dcnr.backends.base import Activation, Philox
from dcnr.backends.numpy.backend import NumpyBackend

backend = NumpyBackend()
RNG = Philox(1, 2, 3, 5)


def test_gelu_is_the_exact_one() -> None:
    """x * Phi(x), in float64 to the last digits."""
    x = np.linspace(-6, 6, 127)
    wanted = [0.5 * value * math.erfc(-value / math.sqrt(2)) for value in x]
    np.testing.assert_allclose(backend.activate("gelu", x), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["relu", "gelu", "silu", "swiglu"])
def test_large_values_neither_warn_nor_turn_into_nan(kind: Activation) -> None:
    """Far out every activation is x, 0 or (swiglu) a product of them."""
    x = np.array([[-1e4, -200.0, 200.0, 1e4]], np.float32)
    y, dx = backend.activate(kind, x), backend.activate_backward(kind, np.ones((1, 2 if kind == "swiglu" else 4), np.float32), x)
    assert np.isfinite(y).all()
    assert np.isfinite(dx).all()
    if kind != "swiglu":
        np.testing.assert_allclose(y, [[0, 0, 200, 1e4]], atol=1e-30)
        np.testing.assert_allclose(dx, [[0, 0, 1, 1]], atol=1e-30)


def test_nan_and_infinity_pass_through_relu() -> None:
    """Or an overflow would vanish before anybody sees it."""
    y = backend.activate("relu", np.array([[np.nan, np.inf, -np.inf]], np.float32))
    assert np.isnan(y[0, 0])
    assert y[0, 1:].tolist() == [np.inf, 0]


def test_dropout_with_a_residual_rounds_once() -> None:
    """In float16 the sum is made in float32."""
    x, residual = np.full((7, 33), 1e-3, np.float16), np.full((7, 33), 1.0, np.float16)
    y = backend.dropout(x, 0.5, RNG, residual)
    kept = backend.random_mask(np.ones((7, 33), np.float32), 0.5, RNG)
    np.testing.assert_array_equal(y, (kept * x.astype(np.float32) * 2 + 1).astype(np.float16))


def test_a_random_mask_keeps_what_dropout_keeps() -> None:
    """Without rescaling."""
    x = np.random.default_rng(1).normal(size=(7, 127)).astype(np.float32)
    np.testing.assert_array_equal(backend.random_mask(x, 0.3, RNG) != 0, backend.dropout(x, 0.3, RNG) != 0)
    kept = backend.random_mask(x, 0.3, RNG)
    np.testing.assert_array_equal(kept[kept != 0], x[kept != 0])
