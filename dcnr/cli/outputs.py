"""Options of commands that follow a run: where its numbers go beside the screen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from dcnr.ids import SessionId
from dcnr.metrics.csv_writer import CsvWriter
from dcnr.metrics.tensorboard_writer import TensorBoardWriter
from dcnr.metrics.wandb_writer import WandbWriter
from dcnr.metrics.writers import Writer, Writers

F = TypeVar("F", bound=Callable[..., Any])


def output_options(command: F) -> F:
    """Add `--csv`, `--tensorboard` and `--wandb` as the fields of an `OutputPlan`."""
    file, folder = click.Path(dir_okay=False, path_type=Path), click.Path(file_okay=False, path_type=Path)
    command = click.option("--wandb", metavar="PROJECT", help="Log to a project of Weights & Biases (extra 'wandb').")(command)
    command = click.option("--tensorboard", type=folder, help="Write TensorBoard events into DIRECTORY/<session>.")(command)
    return click.option("--csv", type=file, help="Write a line for each step; validations go to FILE.validation.csv.")(command)


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """What was asked for."""

    csv: Path | None = None
    tensorboard: Path | None = None
    wandb: str | None = None

    def open(self, session: SessionId, new: bool) -> Writers:
        """Ready to write. A `new` session must not be there already. Raises `UserError`."""
        writers: list[Writer] = []
        if self.csv is not None:
            writers.append(CsvWriter(self.csv, session, new))
        if self.tensorboard is not None:
            writers.append(TensorBoardWriter(self.tensorboard, session, new))
        if self.wandb is not None:
            writers.append(WandbWriter(self.wandb, session, new))
        return Writers(writers)
