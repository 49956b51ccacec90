"""Learning rates over a session."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dcnr.optim.hyper import Hyper
from dcnr.optim.schedule import lr_factor


def values(hyper: Hyper, steps: int, decay_steps: int) -> list[float]:
    """The factors of steps 1 to `steps`."""
    return [lr_factor(hyper, step, decay_steps) for step in range(1, steps + 1)]


def test_constant() -> None:
    """Always one, after a warm-up if there is one."""
    assert values(Hyper(), 3, 3) == [1, 1, 1]
    assert values(Hyper(warmup_steps=2), 4, 4) == [0.5, 1, 1, 1]


def test_linear() -> None:
    """Up to one at the end of the warm-up, down to min_lr at decay_steps, and there it stays."""
    hyper = Hyper(schedule="linear", lr=1.0, min_lr=0.2, warmup_steps=2)
    assert values(hyper, 7, 6) == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine() -> None:
    """Half-way between the ends in the middle; flat at both."""
    hyper = Hyper(schedule="cosine", lr=2.0, min_lr=0.2, warmup_steps=10)
    found = values(hyper, 120, 110)
    assert found[9] == 1
    assert found[59] == pytest.approx((1 + 0.1) / 2)
    assert found[109:] == pytest.approx([0.1] * 11)
    assert found[9] - found[10] < 0.001
    assert all(a >= b for a, b in pairwise(found[9:]))


def test_a_warm_up_longer_than_the_session_never_decays() -> None:
    """And divides by nothing."""
    assert values(Hyper(schedule="cosine", warmup_steps=8), 4, 4) == [0.125, 0.25, 0.375, 0.5]
    assert lr_factor(Hyper(schedule="linear", warmup_steps=8), 9, 4) == 0
