"""How a training run shows itself: JSON lines for scripts, a live bar on a terminal, plain lines elsewhere.

Rule 1: every step is one JSON line; people get a line for the first and last step, one in `EVERY` seconds, and each skipped step.
Rule 2: notes ("waiting for a PNode …") go to stderr, so stdout of `--json` holds only objects.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dcnr.bus.messages import StepMetrics, ValidationMetrics
from dcnr.cli.output import show_json
from dcnr.metrics.fold import Averages, fold

EVERY = 2.0
"""Seconds between plain lines."""
WIDE = 110
"""Columns of a terminal with room for the long bar."""
BAR = 24
SHORT_BAR = 10


class View(Protocol):
    """What is told about a run, as a context manager."""

    def __enter__(self) -> Self:
        """Begin to show."""
        ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave the terminal in order."""
        ...

    def step(self, row: StepMetrics) -> None:
        """A step is done."""
        ...

    def validation(self, row: ValidationMetrics) -> None:
        """A validation is done."""
        ...

    def note(self, text: str) -> None:
        """Something else a person wants to know."""
        ...

    def done(self, session: str, final_loss: float | None) -> None:
        """The run ended well."""
        ...

    def ended(self, session: str, state: str, step: int, reason: str) -> None:
        """The run ended otherwise, which people are told by a note or an error."""
        ...


def choose_view(steps: int, as_json: bool) -> View:
    """The view that fits where stdout goes. `steps`: the run's last step."""
    if as_json:
        return JsonView()
    return BarView(steps) if sys.stdout.isatty() else LineView(steps)


class _Plain:
    """A view that needs no setting up."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def note(self, text: str) -> None:
        """To stderr."""
        click.echo(text, err=True)


class JsonView(_Plain):
    """One object a line."""

    def step(self, row: StepMetrics) -> None:
        """`{"event": "step", …}`, with `mfu` where it is known."""
        show_json({"event": "step", **_fields(row)})

    def validation(self, row: ValidationMetrics) -> None:
        """`{"event": "validation", …}`."""
        show_json({"event": "validation", **_fields(row)})

    def done(self, session: str, final_loss: float | None) -> None:
        """`{"event": "done", …}`."""
        show_json({"event": "done", "session": session, "final_loss": final_loss})

    def ended(self, session: str, state: str, step: int, reason: str) -> None:
        """`{"event": "suspended", …}`, or `failed` or `deleted`."""
        show_json({"event": state, "session": session, "step": step, "reason": reason})


class LineView(_Plain):
    """A line now and then."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._next = 0.0
        self._averages = Averages()

    def step(self, row: StepMetrics) -> None:
        """Print it if it is due."""
        now = time.monotonic()
        self._averages = fold(self._averages, row)
        if now >= self._next or row.step == self._steps or row.skipped:
            self._next = now + EVERY
            left = (self._steps - row.step) * self._averages.step_ms / 1000
            eta = f"  ETA {timedelta(seconds=math.ceil(left))}" if left else ""
            click.echo(f"step {row.step}/{self._steps}  {describe(row)}{eta}")

    def validation(self, row: ValidationMetrics) -> None:
        """Each of them."""
        click.echo(validated(row))

    def done(self, session: str, final_loss: float | None) -> None:
        """The last line."""
        click.echo(farewell(session, final_loss))

    def ended(self, session: str, state: str, step: int, reason: str) -> None:
        """Nothing more than the note or error."""


class BarView:
    """A live bar."""

    def __init__(self, steps: int) -> None:
        self._console = Console()
        bar = BarColumn(BAR if self._console.width >= WIDE else SHORT_BAR)
        self._bar = Progress(MofNCompleteColumn(), bar, TextColumn("{task.description}  ETA"), TimeRemainingColumn(), console=self._console)
        self._rest = len(f"{steps}/{steps} ") + (bar.bar_width or 0) + len("   ETA 0:00:00")
        self._task = self._bar.add_task("waiting for the first step", total=steps)
        self._farewell = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()
        if self._farewell:
            click.echo(self._farewell)

    def step(self, row: StepMetrics) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=row.step, description=describe(row, self._console.width - self._rest))

    def validation(self, row: ValidationMetrics) -> None:
        """Above the bar."""
        self.note(validated(row))

    def note(self, text: str) -> None:
        """Above the bar."""
        self._console.print(text, markup=False, highlight=False)

    def done(self, session: str, final_loss: float | None) -> None:
        """Below the bar, once it has stopped."""
        self._farewell = farewell(session, final_loss)

    def ended(self, session: str, state: str, step: int, reason: str) -> None:
        """Nothing more than the note or error."""


def describe(row: StepMetrics, width: int = 1 << 10) -> str:
    """A step in a few words, of which the most important ones come first; those that `width` columns do not hold are left out."""
    skipped = ["skipped (overflow)"] if row.skipped else []
    speed = f"{row.tokens_per_s:,.0f} tok/s"
    mfu = [f"MFU {row.mfu:.1%}"] if row.mfu is not None else []
    words = [f"loss {row.loss:.4f}", *skipped, speed, f"lr {row.lr:.2e}", f"grad {row.grad_norm:.3f}", *mfu, f"{row.step_ms:.0f} ms"]
    while len(words) > 1 and len("  ".join(words)) > width:
        words.pop()
    return "  ".join(words)


def validated(row: ValidationMetrics) -> str:
    """A validation in a line."""
    numbers = f"validation loss {row.loss:.4f}  perplexity {row.perplexity:,.2f}  {row.bits_per_byte:.4f} bits/byte"
    return f"step {row.step}  {numbers}{'  (best so far)' if row.best else ''}"


def _fields(row: StepMetrics | ValidationMetrics) -> dict[str, object]:
    """For JSON, which has neither NaN nor infinity: they are null. Each step is said once, so its epoch says nothing."""
    kept = {name: value for name, value in asdict(row).items() if name not in ("session", "epoch") and value is not None}
    return {name: value if math.isfinite(value) else None for name, value in kept.items()}


def farewell(session: str, final_loss: float | None) -> str:
    """The end of a run in a few words."""
    loss = "" if final_loss is None else f", final loss {final_loss:.4f}"
    return f"session {session} is done{loss}"
