"""The training log of each session: `history/<session>.jsonl` in the data directory, one step a line.

Rule 1: a file is bounded: past `2 * KEEP` lines it is cut to the newest `KEEP`.
Rule 2: a row of a step takes the place of earlier rows of that step and of later ones: the run went back to a checkpoint.
Rule 3: a last line that a crash cut short counts for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dcnr.bus.messages import StepMetrics
from dcnr.errors import UserError
from dcnr.ids import SessionId

KEEP = 100_000


class History:
    """All logs of a data directory. The methods block; call them from a thread."""

    def __init__(self, data_dir: Path, keep: int = KEEP) -> None:
        self._folder = data_dir / "history"
        self._keep = keep
        self._lines: dict[SessionId, int] = {}

    def append(self, rows: Sequence[StepMetrics]) -> None:
        """Add rows, which may be of several sessions. Raises `UserError` if the disk refuses."""
        for session in dict.fromkeys(row.session for row in rows):
            lines = [json.dumps(asdict(row)) for row in rows if row.session == session]
            try:
                self._append(session, lines)
            except OSError as error:
                remedy = "the data directory must be writable and have room"
                raise UserError(f"{self._path(session)}: {error.strerror or error}", remedy) from error

    def rows(self, session: SessionId) -> list[StepMetrics]:
        """What is known of a session, by step; empty if nothing."""
        found: list[StepMetrics] = []
        for line in self._read(session):
            row = StepMetrics(**json.loads(line))
            while found and found[-1].step >= row.step:
                found.pop()
            found.append(row)
        return found

    def erase(self, session: SessionId) -> None:
        """Forget a session."""
        self._lines.pop(session, None)
        self._path(session).unlink(missing_ok=True)

    def _append(self, session: SessionId, lines: list[str]) -> None:
        if session not in self._lines:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lines[session] = len(self._read(session))
        with self._path(session).open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
        self._lines[session] += len(lines)
        if self._lines[session] > 2 * self._keep:
            self._cut(session)

    def _cut(self, session: SessionId) -> None:
        kept = self._read(session)[-self._keep :]
        beside = self._path(session).with_suffix(".new")
        beside.write_text("".join(f"{line}\n" for line in kept))
        beside.replace(self._path(session))
        self._lines[session] = len(kept)

    def _read(self, session: SessionId) -> list[str]:
        path = self._path(session)
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def _path(self, session: SessionId) -> Path:
        return self._folder / f"{session}.jsonl"
