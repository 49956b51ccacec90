"""Rows are shown once each and in order."""

from __future__ import annotations

import random

import pytest

from dcnr.bus.messages import StepMetrics, ValidationMetrics
from dcnr.client.rows import Rows, Validations
from dcnr.ids import Epoch, SessionId


def row(step: int, epoch: int = 1) -> StepMetrics:
    """One step."""
    return StepMetrics(SessionId("s"), step, 1.0 / step, 1e-3, 1.0, 1.0, False, 100.0, 10.0, Epoch(epoch))


def shown(rows: Rows, *added: StepMetrics) -> list[int]:
    """The steps that are shown when these are added."""
    return [ready.step for one in added for ready in rows.add(one)]


def test_rows_in_order_are_shown_at_once() -> None:
    """Nothing is missing, as far as is known."""
    rows = Rows(first=1)
    assert shown(rows, row(1), row(2), row(3)) == [1, 2, 3]
    assert rows.gap() is None
    assert rows.gap(last=5) == (4, 5)


def test_a_rolled_back_step_is_not_shown_twice() -> None:
    """Whatever its epoch says."""
    rows = Rows(first=1)
    assert shown(rows, row(1), row(2), row(3), row(2, epoch=2), row(3, epoch=2), row(4, epoch=2)) == [1, 2, 3, 4]


def test_rows_behind_a_gap_wait_for_it_to_be_filled() -> None:
    """Of several rows of one step the one of the largest epoch is shown."""
    rows = Rows(first=1)
    assert shown(rows, row(1), row(4), row(5, epoch=2), row(5)) == [1]
    assert rows.gap() == (2, 3)
    assert shown(rows, row(3), row(2)) == [2, 3, 4, 5]
    assert rows.gap() is None
    rows = Rows(first=1)
    rows.add(row(2, epoch=2))
    rows.add(row(2))
    assert rows.add(row(1))[1].epoch == 2


def test_a_gap_that_nobody_can_fill_is_given_up() -> None:
    """Inside, and at the end."""
    rows = Rows(first=1)
    assert shown(rows, row(3), row(4)) == []
    assert [one.step for one in rows.skip()] == [3, 4]
    assert rows.skip(last=9) == []
    assert rows.gap(last=9) is None


def test_whoever_joins_late_begins_with_what_is_heard_first() -> None:
    """What was before is no gap."""
    rows = Rows()
    assert rows.gap(last=100) is None
    assert shown(rows, row(7), row(6), row(8)) == [7, 8]


@pytest.mark.parametrize("seed", range(20))
def test_any_order_and_repetition_shows_every_step_once_in_order(seed: int) -> None:
    """Lost rows are filled in, some of them late."""
    rng = random.Random(seed)
    said = [row(step, rng.randrange(3)) for step in range(1, 40) for _ in range(rng.randrange(3))]
    rng.shuffle(said)
    rows, steps = Rows(first=1), list[int]()
    for one in said:
        steps += shown(rows, one)
        if (gap := rows.gap()) is not None and rng.random() < 0.3:
            steps += shown(rows, *(row(step) for step in range(gap[0], gap[1] + 1)))
    while (gap := rows.gap(last=39)) is not None:
        steps += shown(rows, *(row(step) for step in range(gap[0], gap[1] + 1)))
    assert steps == list(range(1, 40)), f"seed {seed}"


def test_validations_wait_for_their_step_and_are_shown_once() -> None:
    """Of several of one step the one of the largest epoch, and none of a step before one that was shown."""
    validations = Validations()

    def validation(step: int, loss: float, epoch: int = 1) -> ValidationMetrics:
        return ValidationMetrics(SessionId("s"), step, loss, 2.0, 1.0, 100, True, Epoch(epoch))

    assert validations.add(validation(4, 0.5), reached=3) == []
    assert validations.add(validation(4, 0.4, epoch=2), reached=3) == []
    assert validations.add(validation(4, 0.5), reached=3) == []
    assert [one.loss for one in validations.due(4)] == [0.4]
    assert validations.add(validation(4, 0.3, epoch=3), reached=4) == []
    assert validations.add(validation(2, 0.3), reached=9) == []
    assert [one.step for one in validations.add(validation(8, 0.3), reached=9)] == [8]
