"""A picture of a training run: the loss of each step, pale; the same smoothed; and the losses over the validation split, as points.

Rule 1: losses that are no numbers, as those of skipped steps may be, are left out.
Rule 2: the smoothed line is the mean of the last rows, one in `SMOOTH` of those that are drawn, or as many as there are so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dcnr.bus.messages import StepMetrics, ValidationMetrics
from dcnr.errors import UserError

FORMATS = (".png", ".svg", ".pdf")
SMOOTH = 50
"""The part of the rows of which one value is the mean: one in fifty."""
PALE, BLUE, ORANGE = "#a8c5e6", "#1f5fa8", "#d9601a"
SIZE = (8.0, 4.8)
DOTS_PER_INCH = 150


def check_format(path: Path) -> None:
    """Raise `UserError` if the ending of a file says nothing that can be drawn."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"'{path}' ends in none of {', '.join(FORMATS)}", "the ending of the file says what is drawn")


def draw_losses(rows: Sequence[StepMetrics], validations: Sequence[ValidationMetrics], path: Path) -> None:
    """Draw a session that has done steps into a file of one of `FORMATS`."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    _draw_steps(axes, rows)
    _draw_validations(axes, validations)
    axes.set_title(f"session {rows[0].session}", loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _draw_steps(axes: Axes, rows: Sequence[StepMetrics]) -> None:
    drawn = [row for row in rows if math.isfinite(row.loss)]
    steps, losses = [row.step for row in drawn], np.array([row.loss for row in drawn])
    window = max(1, len(drawn) // SMOOTH)
    axes.plot(steps, losses, color=PALE if window > 1 else BLUE, linewidth=0.9, label="loss of a step")
    if window > 1:
        axes.plot(steps, smoothed(losses, window), color=BLUE, linewidth=1.8, label=f"mean of {window * (steps[1] - steps[0]):,} steps")


def _draw_validations(axes: Axes, validations: Sequence[ValidationMetrics]) -> None:
    drawn = [one for one in validations if math.isfinite(one.loss)]
    if not drawn:
        return
    best = min(drawn, key=lambda one: one.loss)
    label = f"validation, best {best.loss:.4f} at step {best.step:,}"
    axes.plot([one.step for one in drawn], [one.loss for one in drawn], "o-", color=ORANGE, markersize=4, linewidth=1.0, label=label)


def smoothed(values: npt.NDArray[np.float64], window: int) -> npt.NDArray[np.float64]:
    """The mean of each value and those before it, `window` in all, or as many as there are."""
    sums = np.cumsum(np.concatenate(([0.0], values)))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))
