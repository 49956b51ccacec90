"""The speed that is shown follows what is measured."""

from __future__ import annotations

import pytest

from dcnr.bus.pace import TOLD_FROM, Pace
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
