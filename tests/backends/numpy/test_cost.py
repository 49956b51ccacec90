"""Costs."""

from __future__ import annotations

import numpy as np
import pytest

from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.backends.numpy.cost import SMALLEST_PROBABILITY, TILE

backend = NumpyBackend()


def test_large_logits_do_not_overflow() -> None:
    """exp(1e4) would; the loss is the distance to the largest."""
    loss, grad = backend.cross_entropy(np.array([[1e4, 0.0, -1e4]], np.float32), np.array([1]), 1.0, 1.0)
    assert loss == 1e4
    np.testing.assert_allclose(grad, [[1, -1, 0]])


def test_an_overflow_reaches_the_gradient() -> None:
    """A loss scale too high for float16 shows as an infinity, without a warning."""
    _, grad = backend.cross_entropy(np.zeros((1, 2), np.float16), np.array([0]), 1.0, 2.0**20)
    assert grad.tolist() == [[-np.inf, np.inf]]


def test_impossible_targets_cost_a_finite_amount() -> None:
    """Probability 0 counts as 1e-12, with gradient zero."""
    loss, grad = backend.cross_entropy_of_probabilities(np.array([[0.0, 1.0]]), np.array([0]), 1.0, 1.0)
    assert loss == pytest.approx(-np.log(SMALLEST_PROBABILITY))
    assert not grad.any()


def test_all_targets_ignored() -> None:
    """Loss and gradient are exactly zero, even where the logits are not finite."""
    logits = np.array([[np.inf, np.nan]], np.float32)
    for cost in (backend.cross_entropy, backend.cross_entropy_of_probabilities, backend.mean_squared_error):
        loss, grad = cost(logits, np.array([-1]), 1.0, 1.0)
        assert loss == 0
        assert not grad.any()


@pytest.mark.parametrize("rows", [1, TILE - 1, TILE, TILE + 1, 2 * TILE + 7])
def test_tiles_are_invisible(rows: int) -> None:
    """The fused head equals a product and a cost for any number of rows, and adds to what is there."""
    rng = np.random.default_rng(rows)
    x, w, b = rng.normal(size=(rows, 7)), rng.normal(size=(33, 7)), rng.normal(size=33)
    targets = rng.integers(-1, 33, rows)
    into_w, into_b = np.ones((33, 7)), np.ones(33)
    loss, dx = backend.lm_head_cross_entropy(x, w, b, targets, 0.5, 4.0, into_w, into_b, True)
    wanted, dlogits = backend.cross_entropy(x @ w.T + b, targets, 0.5, 4.0)
    assert loss == pytest.approx(wanted)
    assert dx is not None
    np.testing.assert_allclose(dx, np.asarray(dlogits @ w), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(into_w - 1, dlogits.T @ x, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(into_b - 1, dlogits.sum(axis=0), rtol=1e-9, atol=1e-12)
