"""A CSV holds every step once, can be read while it is written, and is gone on with after a crash."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from dcnr.errors import UserError
from dcnr.ids import SessionId
from dcnr.metrics.csv_writer import CsvWriter
from tests.metrics.rows import S, step, validation


def lines(path: Path) -> list[dict[str, str]]:
    """The file, as others read it."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_line_is_there_at_once_and_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    """Before the writer is closed; what is not known is empty."""
    path = tmp_path / "run.csv"
    writer = CsvWriter(path, S, new=True)
    assert not path.exists()
    writer.step(step(1, loss=0.1 + 0.2))
    writer.step(step(2, loss=math.nan, mfu=0.45))
    first, second = lines(path)
    assert list(first) == [
        "session", "step", "loss", "lr", "grad_norm", "loss_scale", "skipped", "tokens_per_s", "step_ms", "mfu",
    ]  # fmt: skip
    assert (first["session"], first["step"], float(first["loss"]), first["mfu"]) == ("s", "1", 0.1 + 0.2, "")
    assert math.isnan(float(second["loss"]))
    assert second["mfu"] == "0.45"
    assert not (tmp_path / "run.validation.csv").exists()
    writer.close()


def test_validations_have_a_file_of_their_own(tmp_path: Path) -> None:
    """So that every line of a file has the same columns."""
    writer = CsvWriter(tmp_path / "run.csv", S)
    writer.step(step(1))
    writer.validation(validation(1, loss=0.25))
    writer.close()
    (line,) = lines(tmp_path / "run.validation.csv")
    assert (line["step"], line["loss"], line["tokens"]) == ("1", "0.25", "1000")
    assert len(lines(tmp_path / "run.csv")) == 1


def test_a_file_that_a_crash_cut_short_is_gone_on_with(tmp_path: Path) -> None:
    """Its last line goes, and is written again."""
    path = tmp_path / "run.csv"
    writer = CsvWriter(path, S)
    for number in (1, 2, 3):
        writer.step(step(number))
    writer.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    again = CsvWriter(path, S)
    assert again.last_step == 2
    again.step(step(3))
    again.close()
    assert path.read_bytes() == whole


def test_an_empty_file_is_as_good_as_none(tmp_path: Path) -> None:
    """The header comes with the first row."""
    path = tmp_path / "run.csv"
    path.touch()
    writer = CsvWriter(path, S, new=True)
    writer.step(step(1))
    writer.close()
    assert [line["step"] for line in lines(path)] == ["1"]


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    """Another session, a new one of this name, a table of somebody else's, a folder that is not there: said before anything is written."""
    path = tmp_path / "run.csv"
    writer = CsvWriter(path, S)
    writer.step(step(1))
    writer.close()
    before = path.read_bytes()
    with pytest.raises(UserError, match="holds session 's' already"):
        CsvWriter(path, SessionId("t"))
    with pytest.raises(UserError, match="holds session 's' already"):
        CsvWriter(path, S, new=True)
    assert path.read_bytes() == before
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="something else"):
        CsvWriter(path, S)
    for strange in (b"\r\n", b"s,x\r\n", b"s,,\r\n"):
        path.write_bytes(before + strange)
        with pytest.raises(UserError, match="something else"):
            CsvWriter(path, S)
    with pytest.raises(UserError, match="no folder"):
        CsvWriter(tmp_path / "nowhere" / "run.csv", S)
