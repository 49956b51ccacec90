"""Folding of shards and optimizer updates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dcnr.backends.base import AdamStep, Backend, Precision, SgdStep
from tests.backends.cpu.pair import CPU, SIZES, STORED, Array, draw
from tests.backends.cpu.pair import NUMPY as DEFINITION
from tests.tolerances import assert_close

COUNTS = [*SIZES, 4096, 10001]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_fold(shards: int, count: int) -> None:
    """The sum is bit-equal, its squares are close."""
    ours, theirs = draw(shards, count), draw(shards, count)
    squares, finite = CPU.fold_shards(ours)
    wanted, _ = DEFINITION.fold_shards(theirs)
    np.testing.assert_array_equal(ours[0], theirs[0])
    assert squares == pytest.approx(wanted, rel=1e-9)
    assert finite


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_fold_finds_what_is_not_finite(bad: float) -> None:
    """Wherever it is; and large finite gradients are finite."""
    for at in (0, 4095, 4096, 9999):
        grads = np.full((2, 10000), 1e30, np.float32)
        assert CPU.fold_shards(grads.copy())[1]
        grads[1, at] = bad
        assert not CPU.fold_shards(grads)[1]


def test_add_into() -> None:
    """A tied gradient joins its owner's."""
    a, b = draw(7, 33), draw(7, 33, seed=1)
    wanted = a + b
    CPU.add_into(a, b)
    np.testing.assert_array_equal(a, wanted)


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam(decay: float, count: int, precision: Precision) -> None:
    """Weights, moments and the rounded copy after three updates."""

    def updates(backend: Backend) -> list[Array]:
        w, m, v = draw(count), np.zeros(count, np.float32), np.zeros(count, np.float32)
        low = None if precision == "float32" else backend.from_host(w, precision)
        for t in (1, 2, 3):
            step = AdamStep(1e-2, 0.9, 0.99, 1e-8, decay, 1 - 0.9**t, 1 - 0.99**t, 0.5)
            backend.adam(step, w, draw(count, seed=t), m, v, low)
        return [w, m, v, *([] if low is None else [low])]

    _compare(updates, precision)


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd(momentum: float, count: int, precision: Precision) -> None:
    """With and without momentum."""

    def updates(backend: Backend) -> list[Array]:
        w, m = draw(count), np.zeros(count, np.float32) if momentum else None
        low = None if precision == "float32" else backend.from_host(w, precision)
        for t in (1, 2, 3):
            backend.sgd(SgdStep(0.1, momentum, 0.01, 0.5), w, draw(count, seed=t), m, low)
        return [w, *([] if m is None else [m]), *([] if low is None else [low])]

    _compare(updates, precision)


def _compare(updates: Any, precision: Precision) -> None:
    for index, (a, w) in enumerate(zip(updates(CPU), updates(DEFINITION), strict=True)):
        assert a.dtype == w.dtype
        assert_close(a, w, precision if index == 3 else "float32" if a.dtype == np.float32 else precision)
