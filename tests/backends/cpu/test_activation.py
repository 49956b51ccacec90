"""Activations, and what they do at the ends of the range."""

from __future__ import annotations

import numpy as np
import pytest

from dcnr.backends.base import Activation, Precision
from tests.backends.cpu.pair import CPU, NUMPY, SIZES, STORED, draw, same
from tests.tolerances import assert_close

KINDS: tuple[Activation, ...] = ("relu", "gelu", "silu", "swiglu")


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_forward_and_backward(size: int, kind: Activation, precision: Precision) -> None:
    """Sizes that fill no vector."""
    out = size if kind == "swiglu" else 2 * size
    same(
        lambda backend, put: (
            backend.activate(kind, put(3 * draw(3, 2 * size))),
            backend.activate_backward(kind, put(draw(3, out, seed=1)), put(3 * draw(3, 2 * size))),
        ),
        precision,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_magnitude(kind: Activation) -> None:
    """From the smallest to the largest inputs, of both signs; no formula overflows where the result does not."""
    x = np.concatenate([s * np.logspace(-30, 4, 4001, dtype=np.float32) for s in (1, -1)])
    ones = np.ones(x.size // 2 if kind == "swiglu" else x.size, np.float32)
    assert_close(CPU.activate(kind, x), NUMPY.activate(kind, x), "float32")
    assert_close(CPU.activate_backward(kind, ones, x), NUMPY.activate_backward(kind, ones, x), "float32")


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_get_through(kind: Activation) -> None:
    """Loss scaling finds overflows by them."""
    x = draw(4, 64)
    x[1, 3], x[2, 40], x[3, 63] = np.nan, np.inf, np.nan
    dy = np.ones_like(CPU.activate(kind, x))
    assert np.array_equal(np.isfinite(CPU.activate(kind, x)), np.isfinite(NUMPY.activate(kind, x)))
    actual, wanted = (b.activate_backward(kind, dy, x) for b in (CPU, NUMPY))
    assert np.array_equal(np.isnan(actual), np.isnan(wanted))
    assert np.isnan(CPU.activate_backward(kind, dy * np.float32(np.nan), np.abs(draw(4, 64)))).all()
