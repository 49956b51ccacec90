"""Training logs on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcnr.bus.messages import StepMetrics
from dcnr.errors import UserError
from dcnr.ids import SessionId
from dcnr.metrics.history import History

S = SessionId("s")


def row(step: int, session: SessionId = S) -> StepMetrics:
    """One step."""
    return StepMetrics(session, step, 1.0 / step, 0.1, float("inf"), 1.0, True, 10.0, 100.0)


def test_rows_are_read_back_by_another_process(tmp_path: Path) -> None:
    """Each session's own, infinities included."""
    other = SessionId("t")
    History(tmp_path).append([row(1), row(1, other), row(2)])
    History(tmp_path).append([row(3)])
    assert History(tmp_path).rows(S) == [row(1), row(2), row(3)]
    assert History(tmp_path).rows(other) == [row(1, other)]
    assert History(tmp_path).rows(SessionId("none")) == []


def test_a_repeated_step_supersedes_what_came_after_it(tmp_path: Path) -> None:
    """A run that went back to a checkpoint has no row twice."""
    history = History(tmp_path)
    history.append([row(1), row(2), row(3), row(2)])
    assert history.rows(S) == [row(1), row(2)]


def test_a_log_is_bounded(tmp_path: Path) -> None:
    """The newest rows stay, also when another process had written the others."""
    for step in range(1, 30):
        History(tmp_path, keep=5).append([row(step)])
        assert len((tmp_path / "history/s.jsonl").read_text().splitlines()) <= 10
    assert History(tmp_path).rows(S)[-5:] == [row(step) for step in range(25, 30)]


def test_a_line_that_a_crash_cut_short_counts_for_nothing(tmp_path: Path) -> None:
    """The rows before it are whole."""
    History(tmp_path).append([row(1)])
    with (tmp_path / "history/s.jsonl").open("a") as file:
        file.write('{"session": "s", "st')
    assert History(tmp_path).rows(S) == [row(1)]


def test_an_erased_log_is_gone(tmp_path: Path) -> None:
    """And a new one begins empty."""
    history = History(tmp_path)
    history.append([row(1)])
    history.erase(S)
    history.erase(S)
    history.append([row(1)])
    assert history.rows(S) == [row(1)]


def test_a_disk_that_refuses_is_a_user_error(tmp_path: Path) -> None:
    """With the path."""
    (tmp_path / "history").write_text("in the way")
    with pytest.raises(UserError, match=r"s\.jsonl"):
        History(tmp_path).append([row(1)])
