"""Costs and the fused LM head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dcnr.backends.base import Backend, Precision
from dcnr.backends.cpu import cost
from tests.backends.cpu.pair import CPU, NUMPY, SIZES, STORED, accumulators, draw, same

WEIGHT, SCALE = 0.01, 1024.0


def targets(rows: int, vocabulary: int) -> Any:
    """Ids, of which every third does not count."""
    ids = np.random.default_rng(rows).integers(0, vocabulary, rows)
    ids[2::3] = -1
    return ids


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("vocabulary", [1, 7, 33, 1000])
@pytest.mark.parametrize("rows", SIZES)
def test_costs(rows: int, vocabulary: int, precision: Precision) -> None:
    """Loss and gradient of all four."""
    ids = targets(rows, vocabulary)

    def operation(backend: Backend, put: Any) -> tuple[Any, ...]:
        x = put(5 * draw(rows, vocabulary))
        p = put(np.abs(draw(rows, vocabulary)) + 0.01)
        y = put(draw(rows, vocabulary, seed=1))
        return (
            *backend.cross_entropy(x, ids, WEIGHT, SCALE),
            *backend.cross_entropy_of_probabilities(p, ids, WEIGHT, SCALE),
            *backend.mean_squared_error(x, ids, WEIGHT, SCALE),
            *backend.mean_squared_error(x, y, WEIGHT, SCALE),
        )

    same(operation, precision)


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tiles", [1, 3])
def test_lm_head(tiles: int, bias: bool, precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one tile or several, written and then added to; without accumulators only the loss."""
    rows, vocabulary, width = 64 * tiles - 3, 127, 33
    if tiles > 1:
        monkeypatch.setattr(cost, "TILE_ELEMENTS", 64 * vocabulary)

    def operation(backend: Backend, put: Any) -> tuple[Any, ...]:
        x, w, b = put(draw(rows, width)), put(draw(vocabulary, width)), put(draw(vocabulary)) if bias else None
        into_w, into_b = accumulators(backend, (vocabulary, width), (vocabulary,))
        results: list[Any] = []
        for accumulate in (False, True):
            results += backend.lm_head_cross_entropy(
                x, w, b, targets(rows, vocabulary), WEIGHT, SCALE, into_w, into_b if bias else None, accumulate
            )
        loss = backend.lm_head_cross_entropy(x, w, b, targets(rows, vocabulary), WEIGHT, SCALE, None, None, False)
        return (*results, *loss, into_w, into_b)

    same(operation, precision)


def test_extreme_logits() -> None:
    """Minus infinity is a probability of zero; a NaN or plus infinity shows in the loss."""
    x = draw(3, 33)
    x[:, 5] = -np.inf
    ids = np.array([1, 2, 3])
    assert CPU.cross_entropy(x, ids, 1.0, 1.0)[0] == pytest.approx(NUMPY.cross_entropy(x, ids, 1.0, 1.0)[0], rel=1e-6)
    for bad in (np.nan, np.inf):
        x[1, 7] = bad
        loss, grad = CPU.cross_entropy(x, ids, 1.0, 1.0)
        assert not np.isfinite(loss)
        assert np.isnan(grad[1]).any()
        assert np.isfinite(grad[[0, 2]]).all()


def test_impossible_probabilities_have_a_bounded_loss() -> None:
    """-log of 1e-12 at most, and no gradient there."""
    p = np.array([[0.0, 1.0], [1.0, 0.0]], np.float32)
    loss, grad = CPU.cross_entropy_of_probabilities(p, np.array([0, 0]), 1.0, 1.0)
    assert loss == pytest.approx(-np.log(1e-12), rel=1e-6)
    assert grad[0].tolist() == [0.0, 0.0]


def test_targets_outside_of_the_vocabulary_are_refused() -> None:
    """A kernel would read whatever lies there."""
    with pytest.raises(IndexError, match="vocabulary of 7"):
        CPU.cross_entropy(draw(2, 7), np.array([0, 7]), 1.0, 1.0)
