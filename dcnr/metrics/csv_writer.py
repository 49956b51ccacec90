"""A training log as CSV: a line for each step in FILE.csv, and for each validation in FILE.validation.csv, if there are any.

Rule 1: a file holds one session. One that is there already is gone on with; a last line that a crash cut short is removed.
Rule 2: a line is in the file as soon as its step is known, so that the file can be read while the run goes on.
Rule 3: numbers are written so that reading them gives the same number; what is not known is empty.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TextIO

from dcnr.bus.messages import StepMetrics, ValidationMetrics
from dcnr.errors import UserError
from dcnr.ids import SessionId

COLUMNS = tuple(field.name for field in fields(StepMetrics) if field.name != "epoch")
VALIDATION_COLUMNS = tuple(field.name for field in fields(ValidationMetrics) if field.name != "epoch")


class CsvWriter:
    """A `Writer` of two files. Raises `UserError` for files that hold something else, or the run already if it is `new`."""

    def __init__(self, path: Path, session: SessionId, new: bool = False) -> None:
        self.name = str(path)
        self._steps = _Table(path, COLUMNS, session, new)
        self._validations = _Table(path.with_suffix(f".validation{path.suffix}"), VALIDATION_COLUMNS, session, new)

    @property
    def last_step(self) -> int:
        """The last step that is written there."""
        return self._steps.last

    @property
    def last_validation(self) -> int:
        """The step of the last validation that is written there."""
        return self._validations.last

    def step(self, row: StepMetrics) -> None:
        """Write a step."""
        self._steps.add(row)

    def validation(self, row: ValidationMetrics) -> None:
        """Write a validation."""
        self._validations.add(row)

    def close(self) -> None:
        """Everything is written."""
        self._steps.close()
        self._validations.close()


class _Table:
    """One file, made when its first row comes. `last`: the step of its last row."""

    def __init__(self, path: Path, columns: Sequence[str], session: SessionId, new: bool) -> None:
        self.last = 0
        self._path = path
        self._columns = columns
        self._file: TextIO | None = None
        if not path.parent.is_dir():
            raise UserError(f"{path}: there is no folder '{path.parent}'", "make it, or name another file")
        if path.exists():
            self._take_over(session, new)

    def add(self, row: StepMetrics | ValidationMetrics) -> None:
        """Write a row."""
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8", newline="")
        if self._file.tell() == 0:
            csv.writer(self._file).writerow(self._columns)
        csv.writer(self._file).writerow([getattr(row, column) for column in self._columns])
        self._file.flush()
        self.last = row.step

    def close(self) -> None:
        """Nothing more comes."""
        if self._file is not None:
            self._file.close()

    def _take_over(self, session: SessionId, new: bool) -> None:
        """Go on with what is there."""
        whole = self._path.read_bytes()
        kept = whole[: whole.rfind(b"\n") + 1]
        lines = list(csv.reader(kept.decode("utf-8", "replace").splitlines()))
        ours = lines[:1] == [list(self._columns)] and all(len(line) == len(self._columns) and line[1].isdecimal() for line in lines[1:])
        if whole and not ours:
            raise UserError(f"{self._path} holds something else than a training log of this version", "name another file")
        others = {line[0] for line in lines[1:]} - ({session} if not new else set())
        if others:
            raise UserError(f"{self._path} holds session '{min(others)}' already", "name another file, or remove it")
        self.last = int(lines[-1][1]) if len(lines) > 1 else 0
        if len(kept) < len(whole):
            with self._path.open("r+b") as file:
                file.truncate(len(kept))
