"""A training log for Weights & Biases, which is an extra: a run of the session's name in a project.

Rule 1: a session is one run, whoever writes it and how often: a later writer goes on after the last step that the run has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcnr.bus.messages import StepMetrics, ValidationMetrics
from dcnr.errors import UserError
from dcnr.ids import SessionId
from dcnr.metrics.tensorboard_writer import SCALARS, TRAIN, VALIDATION, VALIDATION_SCALARS


class WandbWriter:
    """A `Writer` of a run of `project`. Raises `UserError` if the library is missing or refuses."""

    def __init__(self, project: str, session: SessionId, new: bool = False) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError("--wandb needs the library of Weights & Biases", "install it: pip install 'dcnr[wandb]'") from error
        self._refusal: type[Exception] = wandb.Error
        self.name = f"Weights & Biases project {project}"
        try:
            self._run: Any = wandb.init(project=project, id=session, name=session, resume="never" if new else "allow")
        except wandb.Error as error:
            raise UserError(f"{self.name} could not be opened: {error}", "log in with `wandb login`, or set WANDB_MODE=offline") from error
        self.last_step = self.last_validation = max(0, self._run.step - 1) if self._run.resumed else 0

    def step(self, row: StepMetrics) -> None:
        """Write a step."""
        self._log(TRAIN, SCALARS, row)
        self.last_step = row.step

    def validation(self, row: ValidationMetrics) -> None:
        """Write a validation, beside its step."""
        self._log(VALIDATION, VALIDATION_SCALARS, row)
        self.last_validation = row.step

    def close(self) -> None:
        """Everything is written."""
        self._try(self._run.finish)

    def _log(self, prefix: str, names: tuple[str, ...], row: StepMetrics | ValidationMetrics) -> None:
        values = {prefix + name: getattr(row, name) for name in names}
        known = {name: value for name, value in values.items() if value is not None}
        self._try(lambda: self._run.log(known, step=row.step))

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except self._refusal as error:
            raise OSError(str(error)) from error
