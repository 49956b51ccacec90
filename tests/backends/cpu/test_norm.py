"""Layer normalisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dcnr.backends.base import Backend, Philox, Precision
from tests.backends.cpu.pair import CPU, SIZES, STORED, accumulators, draw, same


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("width", [7, 33, 127])
def test_forward_and_backward(width: int, rows: int, bias: bool, precision: Precision) -> None:
    """y, mean, rstd, dx, dg, db, of rows that lie far from zero."""

    def operation(backend: Backend, put: Any) -> tuple[Any, ...]:
        x, g, dy = put(draw(rows, width) + 3), put(draw(width)), put(draw(rows, width, seed=1))
        y, mean, rstd = backend.layernorm(x, g, put(draw(width, seed=2)) if bias else None, 1e-5)
        into_g, into_b = accumulators(backend, (width,), (width,))
        dx = backend.layernorm_backward(dy, x, g, mean, rstd, into_g, into_b if bias else None, False)
        backend.layernorm_backward(dy, x, g, mean, rstd, into_g, into_b if bias else None, True)
        return y, mean, rstd, dx, into_g, into_b

    same(operation, precision)


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("rate", [None, 0.0, 0.3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(1, 7), (7, 33), (127, 7), (33, 128), (3, 1500)])
def test_a_residual_sum_and_its_norm(rows: int, width: int, bias: bool, rate: float | None, precision: Precision) -> None:
    """All results and gradients, written and then added to; with and without biases, dropout, and a gradient of the sum."""
    rng = None if rate is None else Philox(1, 2, 3, 5 * width)

    def operation(backend: Backend, put: Any) -> tuple[Any, ...]:
        x, residual, g = put(draw(rows, width)), put(draw(rows, width, seed=1) + 3), put(draw(width, seed=2))
        dy, dsum = put(draw(rows, width, seed=3)), put(draw(rows, width, seed=4))
        first, last = (put(draw(width, seed=5)), put(draw(width, seed=6))) if bias else (None, None)
        total, y, mean, rstd = backend.residual_norm(x, first, residual, rate or 0.0, rng, g, last, 1e-5)
        into = accumulators(backend, (width,), (width,), (width,))
        into_bias, into_g, into_b = into if bias else (None, into[1], None)
        ends = (rate or 0.0, rng, g, mean, rstd, into_bias, into_g, into_b)
        alone = backend.residual_norm_backward(dy, None, total, *ends, False)
        both = backend.residual_norm_backward(dy, dsum, total, *ends, True)
        return total, y, mean, rstd, *alone, *both, *into

    same(operation, precision)


def test_a_residual_norm_is_what_its_parts_give() -> None:
    """Bit for bit in float32: the bias of a linear layer, dropout, sum, norm."""
    x, residual, g, b = draw(33, 127), draw(33, 127, seed=1), draw(127), draw(127, seed=2)
    rng = Philox(1, 2, 3, 64)
    total, y, mean, rstd = CPU.residual_norm(x, b, residual, 0.1, rng, g, b, 1e-5)
    apart = CPU.dropout(x + b, 0.1, rng, residual)
    np.testing.assert_array_equal(total, apart)
    for found, wanted in zip((y, mean, rstd), CPU.layernorm(apart, g, b, 1e-5), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_nan_stays_in_its_row() -> None:
    """And fills it."""
    x = draw(7, 33)
    x[3, 5] = np.nan
    y, mean, rstd = CPU.layernorm(CPU.from_host(x), np.ones(33, np.float32), None, 1e-5)
    assert np.isnan(y).any(axis=1).tolist() == [row == 3 for row in range(7)]
    assert np.isnan(mean[3])
    assert np.isnan(rstd[3])
