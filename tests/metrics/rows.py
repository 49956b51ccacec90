"""Rows of a training log, as tests need them."""

from __future__ import annotations

from dcnr.bus.messages import StepMetrics, ValidationMetrics
from dcnr.ids import Epoch, SessionId

S = SessionId("s")


def step(number: int, session: SessionId = S, epoch: int = 1, loss: float | None = None, mfu: float | None = None) -> StepMetrics:
    """One step."""
    return StepMetrics(session, number, 1.0 / number if loss is None else loss, 1e-3, 0.5, 1.0, False, 1234.5, 8.25, Epoch(epoch), mfu)


def validation(number: int, loss: float = 0.5, session: SessionId = S) -> ValidationMetrics:
    """One validation."""
    return ValidationMetrics(session, number, loss, 1.6, 0.7, 1000, True, Epoch(1))
