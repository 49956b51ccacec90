"""Layer normalisation."""

from __future__ import annotations

import numpy as np
import pytest

from dcnr.backends.base import Philox
from dcnr.backends.numpy.backend import NumpyBackend


def test_float16_rows_are_normalised_in_float32() -> None:
    """Squares beyond 65504 do not overflow; statistics come back as float32."""
    x = np.array([[1000, -1000, 500, -500]], np.float16)
    y, mean, rstd = NumpyBackend().layernorm(x, np.ones(4, np.float16), None, 1e-5)
    assert [x.dtype.name for x in (y, mean, rstd)] == ["float16", "float32", "float32"]
    np.testing.assert_allclose(y, x.astype(np.float32) / np.sqrt(625000), rtol=1e-3)


def test_a_constant_row_becomes_the_bias() -> None:
    """eps keeps the division finite."""
    y, _, rstd = NumpyBackend().layernorm(np.full((3, 7), 5, np.float32), np.ones(7, np.float32), np.full(7, 2, np.float32), 1e-5)
    np.testing.assert_array_equal(y, np.full((3, 7), 2))
    assert np.isfinite(rstd).all()


@pytest.mark.parametrize("rng", [None, Philox(1, 2, 3, 64)])
def test_a_residual_norm_is_what_its_parts_give(rng: Philox | None) -> None:
    """Bias, dropout, sum and norm; and back: the norm's gradient joins that of the sum, and goes to both sides of it."""
    backend, draw = NumpyBackend(), np.random.default_rng(1)
    x, residual, dy, dsum = (draw.normal(size=(7, 33)) for _ in range(4))
    bias, g, b = (draw.normal(size=33) for _ in range(3))
    total, y, mean, rstd = backend.residual_norm(x, bias, residual, 0.3, rng, g, b, 1e-5)
    branch = x + bias if rng is None else backend.dropout(x + bias, 0.3, rng)
    np.testing.assert_allclose(total, branch + residual)
    np.testing.assert_allclose(y, backend.layernorm(total, g, b, 1e-5)[0])
    into, apart = (np.ones((3, 33)) for _ in range(2))
    dx, dresidual = backend.residual_norm_backward(dy, dsum, total, 0.3, rng, g, mean, rstd, into[0], into[1], into[2], True)
    wanted = dsum + backend.layernorm_backward(dy, total, g, mean, rstd, apart[1], apart[2], True)
    apart[0] += dx.sum(axis=0)
    np.testing.assert_allclose(dresidual, wanted)
    np.testing.assert_allclose(dx, wanted if rng is None else backend.dropout(wanted, 0.3, rng))
    np.testing.assert_allclose(into, apart)


def test_the_norm_reads_the_stored_sum() -> None:
    """In float16 a sum is rounded first, so that the backward sees the same numbers."""
    backend, draw = NumpyBackend(), np.random.default_rng(2)
    x, residual = (draw.normal(size=(7, 33)).astype(np.float16) for _ in range(2))
    g = np.ones(33, np.float16)
    total, *normed = backend.residual_norm(x, None, residual, 0.0, None, g, None, 1e-5)
    assert total.dtype == np.float16
    for found, wanted in zip(normed, backend.layernorm(total, g, None, 1e-5), strict=True):
        np.testing.assert_array_equal(found, wanted)
