"""Shows what is told of a training run, and writes it where it was asked for, until the run ends.

Rule 1: `done` ends well; `failed` is an error with the run's own reason; a suspended and a deleted session end with a note.
Rule 2: a file that cannot be written any more is told of once and given up; the run goes on, and so does showing it.
"""

from __future__ import annotations

from dcnr.bus.messages import StepMetrics, ValidationMetrics
from dcnr.cli.progress import View
from dcnr.client.follow import End, Note
from dcnr.client.session import Session
from dcnr.metrics.writers import Writers


async def follow(session: Session, view: View, writers: Writers) -> None:
    """Show everything until the run ends. Raises `DcnrError` if it failed."""
    async for one in session.news(writers.first):
        match one:
            case StepMetrics():
                view.step(one)
                _write(one, view, writers)
            case ValidationMetrics():
                view.validation(one)
                _write(one, view, writers)
            case Note(text):
                view.note(text)
            case End():
                _end(one, view)


def _write(row: StepMetrics | ValidationMetrics, view: View, writers: Writers) -> None:
    for problem in writers.write(row):
        view.note(problem)


def _end(end: End, view: View) -> None:
    if end.state == "done":
        if end.reason:
            view.note(f"session {end.session} {end.reason}")
        view.done(end.session, end.loss)
        return
    view.ended(end.session, end.state, end.step, end.reason)
    if end.error is not None:
        raise end.error
    view.note(str(end))
