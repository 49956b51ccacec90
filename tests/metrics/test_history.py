"""Training logs on disk."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from dcnr.bus.messages import StepMetrics, ValidationMetrics
from dcnr.errors import UserError
from dcnr.ids import Epoch, SessionId
from dcnr.metrics.history import History, Validations

S = SessionId("s")


def row(step: int, session: SessionId = S, epoch: int = 1, loss: float | None = None) -> StepMetrics:
    """One step."""
    return StepMetrics(session, step, 1.0 / step if loss is None else loss, 0.1, float("inf"), 1.0, True, 10.0, 100.0, Epoch(epoch))


def lines(tmp_path: Path) -> int:
    """Of the file."""
    return len((tmp_path / "history/s.jsonl").read_text().splitlines())


def test_rows_are_read_back_by_another_process(tmp_path: Path) -> None:
    """Each session's own, infinities included."""
    other = SessionId("t")
    History(tmp_path).append([row(1), row(1, other), row(2)])
    History(tmp_path).append([row(3)])
    assert History(tmp_path).rows(S) == [row(1), row(2), row(3)]
    assert History(tmp_path).rows(other) == [row(1, other)]
    assert History(tmp_path).rows(SessionId("none")) == []


def test_validations_have_a_log_of_their_own(tmp_path: Path) -> None:
    """Of several of one step that of the largest epoch stands, as with steps; erasing one log leaves the other."""
    old, new = (ValidationMetrics(S, 4, loss, 2.0, float("nan"), 10, True, Epoch(epoch)) for loss, epoch in ((1.5, 1), (1.25, 2)))
    History(tmp_path).append([row(4)])
    Validations(tmp_path).append([old, new])
    assert [one.loss for one in Validations(tmp_path).rows(S)] == [1.25]
    History(tmp_path).erase(S)
    assert len(Validations(tmp_path).rows(S)) == 1
    Validations(tmp_path).erase(S)
    assert (Validations(tmp_path).rows(S), History(tmp_path).rows(S)) == ([], [])


def test_there_is_one_row_a_step_that_of_the_largest_epoch(tmp_path: Path) -> None:
    """1. a step that was rolled back comes again; 2. of equal epochs the last counts; 3. a late row of an old epoch counts for nothing."""
    history = History(tmp_path)
    history.append([row(1), row(2), row(3), row(2, epoch=2, loss=7.0)])
    assert history.rows(S) == [row(1), row(2, epoch=2, loss=7.0), row(3)]
    history.append([row(2, epoch=2, loss=8.0), row(2, loss=9.0), row(3, epoch=2)])
    assert history.rows(S) == [row(1), row(2, epoch=2, loss=8.0), row(3, epoch=2)]
    assert lines(tmp_path) == 7


def test_rows_of_a_time_before_epochs_are_read(tmp_path: Path) -> None:
    """As of epoch 0."""
    (tmp_path / "history").mkdir()
    fields = {name: value for name, value in asdict(row(1)).items() if name != "epoch"}
    (tmp_path / "history/s.jsonl").write_text(json.dumps(fields) + "\n")
    assert History(tmp_path).rows(S) == [row(1, epoch=0)]


def test_replays_do_not_let_a_file_grow(tmp_path: Path) -> None:
    """Each process that goes on with it first drops what is superseded, if that is more than half; the rows stay the same."""
    for epoch in range(1, 40):
        History(tmp_path).append([row(step, epoch=epoch) for step in range(1, 11)])
        assert lines(tmp_path) <= 30
    assert History(tmp_path).rows(S) == [row(step, epoch=39) for step in range(1, 11)]
    assert [path.name for path in (tmp_path / "history").iterdir()] == ["s.jsonl"]


def test_a_log_is_bounded(tmp_path: Path) -> None:
    """The newest rows stay, also when another process had written the others."""
    for step in range(1, 30):
        History(tmp_path, keep=5).append([row(step)])
        assert len((tmp_path / "history/s.jsonl").read_text().splitlines()) <= 10
    assert History(tmp_path).rows(S)[-5:] == [row(step) for step in range(25, 30)]


@pytest.mark.parametrize("rest", ['{"session": "s", "st', '{"session": "s"}', "\x00\x00", '{"session": "s", "step": 2, "loss": 0.5'])
def test_a_line_that_a_crash_cut_short_counts_for_nothing(tmp_path: Path, rest: str) -> None:
    """The rows before it are whole, and so are those that are added afterwards."""
    History(tmp_path).append([row(1)])
    with (tmp_path / "history/s.jsonl").open("a") as file:
        file.write(rest)
    assert History(tmp_path).rows(S) == [row(1)]
    History(tmp_path).append([row(2)])
    assert History(tmp_path).rows(S) == [row(1), row(2)]
    assert lines(tmp_path) == 2


def test_a_whole_row_whose_line_has_no_end_is_kept(tmp_path: Path) -> None:
    """The crash came between the two."""
    History(tmp_path).append([row(1), row(2)])
    path = tmp_path / "history/s.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    History(tmp_path).append([row(3)])
    assert History(tmp_path).rows(S) == [row(1), row(2), row(3)]


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
