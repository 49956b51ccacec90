"""The training log of each session: `history/<session>.jsonl` in the data directory, one row a line; and that of its validations, in a
folder `validations` beside it.

Rule 1: rows are only added. Of several rows of one step the one of the largest epoch stands, and of those the last: the others were
rolled back, and are superseded. Readers see exactly one row a step, in the order of steps.
Rule 2: a file is bounded: past `2 * KEEP` lines it is cut to the newest `KEEP` steps, and a file of which more than half is superseded is
written anew without that when it is opened for adding. Both put a whole new file in place of the old one.
Rule 3: a line that a crash cut short counts for nothing, and nothing is added behind it: it goes when the file is opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Generic, TypeVar

from dcnr.bus.messages import StepMetrics, ValidationMetrics
from dcnr.errors import UserError
from dcnr.ids import SessionId

KEEP = 100_000

R = TypeVar("R", StepMetrics, ValidationMetrics)


class Log(Generic[R]):
    """The logs of all sessions, in a folder, of rows of one `kind`. The methods block; call them from a thread."""

    def __init__(self, folder: Path, kind: type[R], keep: int) -> None:
        self._folder = folder
        self._kind: type[R] = kind
        self._keep = keep
        self._lines: dict[SessionId, int] = {}

    def append(self, rows: Sequence[R]) -> None:
        """Add rows, which may be of several sessions. Raises `UserError` if the disk refuses."""
        for session in dict.fromkeys(row.session for row in rows):
            try:
                self._append(session, [row for row in rows if row.session == session])
            except OSError as error:
                remedy = "the data directory must be writable and have room"
                raise UserError(f"{self._path(session)}: {error.strerror or error}", remedy) from error

    def rows(self, session: SessionId) -> list[R]:
        """What is known of a session, by step; empty if nothing."""
        return standing(self._read(session))

    def erase(self, session: SessionId) -> None:
        """Forget a session."""
        self._lines.pop(session, None)
        self._path(session).unlink(missing_ok=True)

    def _append(self, session: SessionId, rows: list[R]) -> None:
        if session not in self._lines:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._open(session)
        with self._path(session).open("a") as file:
            file.writelines(_lines(rows))
        self._lines[session] += len(rows)
        if self._lines[session] > 2 * self._keep:
            self._rewrite(session, self.rows(session)[-self._keep :])

    def _open(self, session: SessionId) -> None:
        """Bring a file that another process wrote into order, and count its lines."""
        path = self._path(session)
        whole = path.read_bytes() if path.exists() else b""
        rows = self._read(session)
        kept = standing(rows)
        if 2 * len(kept) < len(rows) or not whole.endswith(b"\n") or whole.count(b"\n") != len(rows):
            self._rewrite(session, kept)
        else:
            self._lines[session] = len(rows)

    def _rewrite(self, session: SessionId, rows: Sequence[R]) -> None:
        path = self._path(session)
        beside = path.with_suffix(".new")
        with beside.open("w") as file:
            file.writelines(_lines(rows))
        beside.replace(path)
        self._lines[session] = len(rows)

    def _read(self, session: SessionId) -> list[R]:
        path = self._path(session)
        found = (_row(self._kind, line) for line in path.read_text(errors="replace").splitlines()) if path.exists() else ()
        return [row for row in found if row is not None]

    def _path(self, session: SessionId) -> Path:
        return self._folder / f"{session}.jsonl"


class History(Log[StepMetrics]):
    """The training logs of a data directory."""

    def __init__(self, data_dir: Path, keep: int = KEEP) -> None:
        super().__init__(data_dir / "history", StepMetrics, keep)


class Validations(Log[ValidationMetrics]):
    """The same of validations."""

    def __init__(self, data_dir: Path, keep: int = KEEP) -> None:
        super().__init__(data_dir / "history" / "validations", ValidationMetrics, keep)


def standing(rows: Iterable[R]) -> list[R]:
    """Of rows as they were written, those that stand, by step."""
    found: dict[int, R] = {}
    for row in rows:
        known = found.get(row.step)
        if known is None or row.epoch >= known.epoch:
            found[row.step] = row
    return [found[step] for step in sorted(found)]


def _lines(rows: Iterable[R]) -> Iterable[str]:
    return (f"{json.dumps(asdict(row))}\n" for row in rows)


def _row(kind: type[R], line: str) -> R | None:
    """None for a line that a crash cut short."""
    try:
        return kind(**json.loads(line))
    except (ValueError, TypeError):
        return None
