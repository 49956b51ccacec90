"""Folding and updates, against formulas written out. `tests/optim` compares them with PyTorch."""

from __future__ import annotations

import numpy as np

from dcnr.backends.base import AdamStep, SgdStep
from dcnr.backends.numpy.backend import NumpyBackend

backend = NumpyBackend()


def test_shards_are_added_in_order_and_measured() -> None:
    """In place, into the first; the sum of squares is that of the result."""
    grads = np.random.default_rng(1).normal(size=(3, 7, 33)).astype(np.float32)
    wanted = (grads[0] + grads[1]) + grads[2]
    squares, finite = backend.fold_shards(grads)
    np.testing.assert_array_equal(grads[0], wanted)
    assert squares == float((wanted.astype(np.float64) ** 2).sum())
    assert finite


def test_infinity_and_nan_are_found() -> None:
    """Anywhere, also where two infinities cancel to NaN; a large number is neither."""
    for bad in (np.inf, -np.inf, np.nan):
        grads = np.zeros((2, 127), np.float32)
        grads[1, 100] = bad
        assert not backend.fold_shards(grads)[1]
    assert not backend.fold_shards(np.array([[np.inf], [-np.inf]], np.float32))[1]
    assert backend.fold_shards(np.full((1, 127), 3e38, np.float32))[1]


def test_adam_updates_in_place_and_rounds_the_copy() -> None:
    """One step: with both corrections, the first moves every weight by lr against its gradient's sign; decay shrinks first."""
    w, g = np.array([1.0, -2.0], np.float32), np.array([8.0, -0.008], np.float32)
    m, v, low = np.zeros(2, np.float32), np.zeros(2, np.float32), np.zeros(2, np.float16)
    backend.adam(AdamStep(0.1, 0.9, 0.999, 1e-8, 0.5, 1 - 0.9, 1 - 0.999, 0.25), w, g, m, v, low)
    np.testing.assert_allclose(w, [0.95 - 0.1, -1.9 + 0.1], rtol=1e-4)
    np.testing.assert_allclose(m, 0.1 * 0.25 * np.array([8, -0.008]), rtol=1e-5)
    np.testing.assert_allclose(v, 0.001 * (0.25 * np.array([8, -0.008])) ** 2, rtol=1e-4)
    np.testing.assert_array_equal(low, w.astype(np.float16))


def test_sgd_with_and_without_momentum() -> None:
    """Two steps with the same gradient."""
    g, low = np.array([4.0], np.float32), np.zeros(1, np.float16)
    w, m = np.array([1.0], np.float32), np.zeros(1, np.float32)
    for _ in range(2):
        backend.sgd(SgdStep(0.1, 0.5, 0.0, 0.5), w, g, m, low)
    np.testing.assert_allclose(w, 1 - 0.1 * 2 - 0.1 * 3, rtol=1e-6)
    np.testing.assert_array_equal(low, w.astype(np.float16))
    w = np.array([1.0], np.float32)
    backend.sgd(SgdStep(0.1, 0.0, 0.5, 1.0), w, g, None, None)
    np.testing.assert_allclose(w, 1 - 0.1 * (4 + 0.5), rtol=1e-6)


def test_a_tied_gradient_joins_its_owners() -> None:
    """In place."""
    into = np.ones(3, np.float32)
    backend.add_into(into, np.full(3, 2, np.float32))
    assert into.tolist() == [3, 3, 3]
