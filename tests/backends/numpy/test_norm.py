"""Layer normalisation."""

from __future__ import annotations

import numpy as np

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
