"""The speed that is shown follows what is measured."""

from __future__ import annotations

import pytest

from dcnr.bus.pace import LONGEST, TOLD_FROM, Pace, Patience
from dcnr.ids import PNodeId

A, B = PNodeId("a"), PNodeId("b")


def test_the_first_large_tensor_sets_the_rate_and_later_ones_move_it() -> None:
    """Each peer and lane by itself."""
    pace = Pace()
    pace.note(A, "tcp", TOLD_FROM, 0.5)
    assert pace.rate(A, "tcp") == 2 * TOLD_FROM
    pace.note(A, "tcp", TOLD_FROM, 1.0)
    assert pace.rate(A, "tcp") == pytest.approx(1.8 * TOLD_FROM)
    assert pace.rate(A, "shm") == pace.rate(B, "tcp") == 0


def test_small_tensors_and_no_time_at_all_say_nothing() -> None:
    """They would be measured wrongly."""
    pace = Pace()
    pace.note(A, "tcp", TOLD_FROM - 1, 1.0)
    pace.note(A, "tcp", TOLD_FROM, 0.0)
    assert pace.rate(A, "tcp") == 0


def test_a_peer_that_is_gone_is_forgotten() -> None:
    """The others are not."""
    pace = Pace()
    for peer in (A, B):
        pace.note(peer, "tcp", TOLD_FROM, 0.5)
    pace.forget(A)
    assert (pace.rate(A, "tcp"), pace.rate(B, "tcp")) == (0, 2 * TOLD_FROM)


def test_pauses_follow_what_answers_took() -> None:
    """1. unknown: the first pause; 2. quick: a quarter of it; each pause twice the one before; 3. slow: more, believed at once."""
    patience = Patience(2.0, tries=8)
    assert [patience.pause(again) for again in range(4)] == [2.0, 4.0, 8.0, 8.0]
    assert patience.limit == 16.0
    patience.note(0.01)
    assert [patience.pause(again) for again in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert patience.limit == 16.0
    patience.note(10.0)
    assert [patience.pause(again) for again in range(2)] == [LONGEST, LONGEST]
    assert patience.limit == 320.0


def test_a_slow_moment_is_forgotten_by_and_by() -> None:
    """Not by one quick answer."""
    patience = Patience(2.0)
    patience.note(1.0)
    patience.note(0.01)
    assert patience.pause(0) > 3.0
    for _ in range(30):
        patience.note(0.01)
    assert patience.pause(0) == 0.5
