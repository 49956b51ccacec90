"""Where the numbers of a run go beside the screen, as options say it."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dcnr.cli.outputs import OutputPlan, output_options
from dcnr.errors import UserError
from dcnr.metrics.tensorboard_writer import read_scalars
from tests.metrics.rows import S, step


@click.command()
@output_options
def command(csv: Path | None, tensorboard: Path | None, wandb: str | None) -> None:
    """A command with the options."""
    with OutputPlan(csv, tensorboard, wandb).open(S, new=True) as writers:
        for number in (1, 2, 2):
            assert writers.write(step(number)) == []


def test_everything_that_is_asked_for_is_written(tmp_path: Path) -> None:
    """All at once, each step once; a second run under the same name is refused before it writes."""
    csv, events = tmp_path / "run.csv", tmp_path / "tb"
    arguments = ["--csv", str(csv), "--tensorboard", str(events)]
    assert CliRunner().invoke(command, arguments, catch_exceptions=False).exit_code == 0
    assert [line.split(",")[1] for line in csv.read_text().splitlines()] == ["step", "1", "2"]
    assert [number for tag, number, _ in read_scalars(events / S) if tag == "train/loss"] == [1, 2]
    with pytest.raises(UserError, match="already"):
        CliRunner().invoke(command, arguments, catch_exceptions=False)


def test_without_options_nothing_is_written(tmp_path: Path) -> None:
    """And nothing is asked for."""
    assert CliRunner().invoke(command, [], catch_exceptions=False).exit_code == 0
    assert OutputPlan().open(S, new=False).first is None
    assert list(tmp_path.iterdir()) == []
