"""Moving averages over rows."""

from __future__ import annotations

import pytest

from dcnr.bus.messages import StepMetrics
from dcnr.ids import Epoch, SessionId
from dcnr.metrics.fold import WINDOW, Averages, fold


def row(step: int, loss: float = 1.0, step_ms: float = 100.0, epoch: int = 0) -> StepMetrics:
    """A row of 100 tokens."""
    return StepMetrics(SessionId("s"), step, loss, 0.1, 1.0, 1.0, False, 100.0 / step_ms * 1000, step_ms, Epoch(epoch))


def test_there_is_no_average_before_the_first_row() -> None:
    """Zeros and nothing, not an error."""
    nothing = Averages()
    assert (nothing.step_ms, nothing.tokens_per_s, nothing.loss) == (0.0, 0.0, None)


def test_speed_is_tokens_over_time() -> None:
    """200 tokens in 400 ms, although the mean of the two speeds is 666."""
    averages = fold(fold(Averages(), row(1, step_ms=100.0)), row(2, loss=3.0, step_ms=300.0))
    assert averages.tokens_per_s == pytest.approx(500.0)
    assert averages.step_ms == pytest.approx(200.0)
    assert averages.loss == pytest.approx(2.0)


def test_only_the_newest_rows_count() -> None:
    """A window that does not grow."""
    averages = Averages()
    for step in range(1, 3 * WINDOW + 1):
        averages = fold(averages, row(step, loss=float(step)))
    assert [known.step for known in averages.rows] == list(range(2 * WINDOW + 1, 3 * WINDOW + 1))


def test_a_repeated_step_takes_the_place_of_what_it_undoes() -> None:
    """After a return to a checkpoint nothing counts twice."""
    averages = Averages()
    for step in (1, 2, 3, 2):
        averages = fold(averages, row(step))
    assert [known.step for known in averages.rows] == [1, 2]


def test_a_late_row_of_an_older_epoch_changes_nothing() -> None:
    """It was rolled back."""
    averages = fold(fold(Averages(), row(1, epoch=1)), row(2, epoch=2))
    assert fold(averages, row(1, epoch=1)) == averages
