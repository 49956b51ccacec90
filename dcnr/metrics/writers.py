"""Where the rows of a training run may go beside the screen: what a writer is, and how several write the same run.

Rule 1: each writer gets each step once and each validation once, in order: what it has from an earlier time is passed over, and a step
that was rolled back comes only once.
Rule 2: a writer that fails is closed and given up; the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Protocol, Self

from dcnr.bus.messages import StepMetrics, ValidationMetrics


class Writer(Protocol):
    """Somewhere that rows of one session are written to. Every method may raise `OSError`."""

    @property
    def name(self) -> str:
        """What a person calls it: a path, a project."""
        ...

    @property
    def last_step(self) -> int:
        """The last step that is written there; 0 for none."""
        ...

    @property
    def last_validation(self) -> int:
        """The step of the last validation that is written there; 0 for none."""
        ...

    def step(self, row: StepMetrics) -> None:
        """Write a step later than `last_step`."""
        ...

    def validation(self, row: ValidationMetrics) -> None:
        """Write a validation later than `last_validation`."""
        ...

    def close(self) -> None:
        """Everything is written."""
        ...


class Writers:
    """All writers of a run, as a context manager that closes them."""

    def __init__(self, writers: Sequence[Writer] = ()) -> None:
        self._writers = list(writers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with ExitStack() as closing:
            for writer in self._writers:
                closing.callback(writer.close)

    @property
    def first(self) -> int | None:
        """The first step of which one of them may lack something: its last, since a validation comes after its step. None without any."""
        return min((max(1, writer.last_step) for writer in self._writers), default=None)

    def write(self, row: StepMetrics | ValidationMetrics) -> list[str]:
        """Write a row; returns what went wrong, in words."""
        problems = []
        for writer in list(self._writers):
            try:
                _write(writer, row)
            except OSError as error:
                problems.append(f"{writer.name} could not be written any more, and lacks what follows: {error.strerror or error}")
                self._writers.remove(writer)
                with suppress(OSError):
                    writer.close()
        return problems


def _write(writer: Writer, row: StepMetrics | ValidationMetrics) -> None:
    match row:
        case StepMetrics():
            if row.step > writer.last_step:
                writer.step(row)
        case ValidationMetrics():
            if row.step > writer.last_validation:
                writer.validation(row)
