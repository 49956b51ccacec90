"""TensorBoard events: what is written is read back by the format's own definition, each step once, also after a crash."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tensorboardX.record_writer import RecordWriter

from dcnr.errors import UserError
from dcnr.metrics.tensorboard_writer import TensorBoardWriter, read_scalars
from dcnr.metrics.writers import Writers
from tests.metrics.rows import S, step, validation


def steps_of(folder: Path, tag: str) -> list[int]:
    """The steps of a tag, over all event files."""
    return [number for name, number, _ in read_scalars(folder / S) if name == tag]


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    """Tags, steps and values; what is not known has no tag."""
    writer = TensorBoardWriter(tmp_path, S, new=True)
    assert not (tmp_path / S).exists()
    writer.step(step(1, loss=2.5))
    writer.step(step(2, loss=1.5, mfu=0.25))
    writer.validation(validation(2, loss=1.75))
    writer.close()
    found = {(tag, number): value for tag, number, value in read_scalars(tmp_path / S)}
    assert (found["train/loss", 1], found["train/loss", 2], found["validation/loss", 2]) == (2.5, 1.5, 1.75)
    assert ("train/mfu", 1) not in found
    assert found["train/mfu", 2] == 0.25
    assert {tag for tag, _ in found} == {
        *(f"train/{name}" for name in ("loss", "lr", "grad_norm", "loss_scale", "tokens_per_s", "step_ms", "mfu")),
        *(f"validation/{name}" for name in ("loss", "perplexity", "bits_per_byte")),
    }


def test_a_later_writer_goes_on(tmp_path: Path) -> None:
    """It knows the last step and the last validation, and that what was cut short is not there, and a new session does not mix with it."""
    writer = TensorBoardWriter(tmp_path, S)
    for number in (1, 2, 3):
        writer.step(step(number))
    writer.validation(validation(2))
    writer.close()
    (file,) = (tmp_path / S).iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    again = TensorBoardWriter(tmp_path, S)
    assert (again.last_step, again.last_validation) == (3, 0)
    again.step(step(4))
    again.validation(validation(2))
    again.close()
    with pytest.raises(UserError, match="holds session 's' already"):
        TensorBoardWriter(tmp_path, S, new=True)
    assert len(list((tmp_path / S).iterdir())) == 2
    assert steps_of(tmp_path, "train/loss") == [1, 2, 3, 4]
    assert TensorBoardWriter(tmp_path, S).last_validation == 2


def test_a_full_disk_is_told_of_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows follow."""

    def full(_self: RecordWriter) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RecordWriter, "flush", full)
    writers = Writers([TensorBoardWriter(tmp_path, S)])
    problems = [writers.write(step(number)) for number in range(1, 100)]
    assert [len(found) for found in problems] == [1] + 98 * [0]
    assert "No space left on device" in problems[0][0]
