"""The rows of a training log in the order in which they are shown: each step once, whatever gets lost, is late or is said again.

Rule 1: a row of a step that was shown is not shown again: after a rollback it says the same.
Rule 2: a validation is shown once, after the row of its step.
Rule 3: rows behind a gap wait until the gap is filled, or nobody knows what was in it.
"""

from __future__ import annotations

from dcnr.bus.messages import StepMetrics, ValidationMetrics


class Rows:
    """What was shown, and what waits to be. `first`: the step that is to be shown first; None for whichever is heard first."""

    def __init__(self, first: int | None = None) -> None:
        self._next = first
        self._waiting: dict[int, StepMetrics] = {}

    @property
    def reached(self) -> int:
        """The last step that was shown; 0 before the first."""
        return 0 if self._next is None else self._next - 1

    def add(self, row: StepMetrics) -> list[StepMetrics]:
        """One more row; returns what is to be shown now."""
        if self._next is None:
            self._next = row.step
        known = self._waiting.get(row.step)
        if row.step >= self._next and (known is None or row.epoch >= known.epoch):
            self._waiting[row.step] = row
        return self._ready()

    def gap(self, last: int = 0) -> tuple[int, int] | None:
        """First and last of the steps that are missing before the next row, or else up to step `last`; None if there are none."""
        if self._next is None:
            return None
        end = min(self._waiting) - 1 if self._waiting else last
        return (self._next, end) if self._next <= end else None

    def skip(self, last: int = 0) -> list[StepMetrics]:
        """Give up the gap; returns what is to be shown now."""
        if (gap := self.gap(last)) is not None:
            self._next = gap[1] + 1
        return self._ready()

    def _ready(self) -> list[StepMetrics]:
        ready = []
        while self._next is not None and self._next in self._waiting:
            ready.append(self._waiting.pop(self._next))
            self._next += 1
        return ready


class Validations:
    """Validations that wait for the row of their step, and what was shown."""

    def __init__(self) -> None:
        self._shown = 0
        self._waiting: dict[int, ValidationMetrics] = {}

    def add(self, one: ValidationMetrics, reached: int) -> list[ValidationMetrics]:
        """One more; `reached` is the last step that was shown. Returns what is to be shown now."""
        known = self._waiting.get(one.step)
        if one.step > self._shown and (known is None or one.epoch >= known.epoch):
            self._waiting[one.step] = one
        return self.due(reached)

    def due(self, reached: int) -> list[ValidationMetrics]:
        """What waited for step `reached` or one before it."""
        ready = [self._waiting.pop(step) for step in sorted(self._waiting) if step <= reached]
        self._shown = max(self._shown, *(one.step for one in ready), 0)
        return ready
