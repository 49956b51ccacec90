"""Several writers of a run: each gets every row once, and one that fails takes nobody along."""

from __future__ import annotations

import errno
import os

import pytest

from dcnr.bus.messages import StepMetrics, ValidationMetrics
from dcnr.metrics.writers import Writers
from tests.metrics.rows import step, validation


class Memory:
    """A writer that remembers, and that may break at a step."""

    name = "memory"

    def __init__(self, last_step: int = 0, last_validation: int = 0, breaks_at: int = 0) -> None:
        self.last_step = last_step
        self.last_validation = last_validation
        self.rows: list[int] = []
        self.closed = 0
        self._breaks_at = breaks_at

    def step(self, row: StepMetrics) -> None:
        """Keep it."""
        if row.step == self._breaks_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.rows.append(row.step)
        self.last_step = row.step

    def validation(self, row: ValidationMetrics) -> None:
        """Keep it."""
        self.rows.append(-row.step)
        self.last_validation = row.step

    def close(self) -> None:
        """Count it."""
        self.closed += 1


def test_each_writer_gets_what_it_lacks() -> None:
    """Steps that are said again are written once; the first that is asked for is the last that one of them has, for its validation."""
    empty, fuller = Memory(), Memory(last_step=2, last_validation=2)
    with Writers([fuller, empty]) as writers:
        assert writers.first == 1
        for row in (step(1), step(2), validation(2), step(2, epoch=2), validation(2), step(3), validation(3)):
            assert writers.write(row) == []
        assert writers.first == 3
    assert (empty.rows, fuller.rows) == ([1, 2, -2, 3, -3], [3, -3])
    assert (empty.closed, fuller.closed) == (1, 1)


def test_a_writer_that_fails_is_told_of_once_and_given_up() -> None:
    """The others go on."""
    broken, well = Memory(breaks_at=2), Memory()
    with Writers([broken, well]) as writers:
        problems = [writers.write(step(number)) for number in (1, 2, 3)]
    assert problems == [[], ["memory could not be written any more, and lacks what follows: No space left on device"], []]
    assert (broken.rows, broken.closed, well.rows, well.closed) == ([1], 1, [1, 2, 3], 1)


def test_without_writers_nothing_is_asked_for() -> None:
    """Then only what comes is shown."""
    with Writers() as writers:
        assert (writers.first, writers.write(step(1))) == (None, [])


def test_one_that_cannot_be_closed_leaves_the_others_closed() -> None:
    """And is told of."""

    class Full(Memory):
        def close(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    well, other = Memory(), Memory()
    with pytest.raises(OSError, match="No space left"), Writers([well, Full(), other]):
        pass
    assert (well.closed, other.closed) == (1, 1)
