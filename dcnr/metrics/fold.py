"""Moving averages over the rows of a training log.

Rule 1: an average is of the last `WINDOW` rows; speed is tokens over time, so a slow step weighs what it took.
Rule 2: a row of a step that was seen already takes the place of it and of what came after: the run went back to a checkpoint. One of an
older epoch than the newest row comes late, and counts for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcnr.bus.messages import StepMetrics

WINDOW = 20


@dataclass(frozen=True, slots=True)
class Averages:
    """Of the rows so far. `rows` are the newest ones, oldest first."""

    rows: tuple[StepMetrics, ...] = ()

    @property
    def step_ms(self) -> float:
        """Mean milliseconds of a step; 0 before the first."""
        return sum(row.step_ms for row in self.rows) / len(self.rows) if self.rows else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens over time; 0 before the first row."""
        total_ms = sum(row.step_ms for row in self.rows)
        return sum(row.tokens_per_s * row.step_ms for row in self.rows) / total_ms if total_ms else 0.0

    @property
    def loss(self) -> float | None:
        """Mean loss; None before the first row."""
        return sum(row.loss for row in self.rows) / len(self.rows) if self.rows else None


def fold(averages: Averages, row: StepMetrics) -> Averages:
    """The averages after one more row."""
    if averages.rows and row.epoch < averages.rows[-1].epoch:
        return averages
    return Averages((*(known for known in averages.rows if known.step < row.step), row)[-WINDOW:])
