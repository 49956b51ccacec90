"""Layer normalisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dcnr.backends.base import Backend, Precision
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


def test_nan_stays_in_its_row() -> None:
    """And fills it."""
    x = draw(7, 33)
    x[3, 5] = np.nan
    y, mean, rstd = CPU.layernorm(CPU.from_host(x), np.ones(33, np.float32), None, 1e-5)
    assert np.isnan(y).any(axis=1).tolist() == [row == 3 for row in range(7)]
    assert np.isnan(mean[3])
    assert np.isnan(rstd[3])
