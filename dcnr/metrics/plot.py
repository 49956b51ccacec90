"""A picture of a training run: the loss of each step, pale; the same smoothed; and the losses over the validation split, as points.

Rule 1: losses that are no numbers, as those of skipped steps may be, are left out.
Rule 2: the smoothed line is the mean of the rows around each, on either side one in `SMOOTH` of those that are drawn.
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
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _draw_steps(axes: Axes, rows: Sequence[StepMetrics]) -> None:
    drawn = [row for row in rows if math.isfinite(row.loss)]
    steps, losses = [row.step for row in drawn], np.array([row.loss for row in drawn])
    reach = len(drawn) // SMOOTH
    axes.plot(steps, losses, color=PALE if reach else BLUE, linewidth=0.9, label="loss of a step")
    if reach:
        around = (2 * reach + 1) * (steps[1] - steps[0])
        axes.plot(steps, smoothed(losses, reach), color=BLUE, linewidth=1.8, label=f"smoothed over {around:,} steps")


def _draw_validations(axes: Axes, validations: Sequence[ValidationMetrics]) -> None:
    drawn = [one for one in validations if math.isfinite(one.loss)]
    if not drawn:
        return
    best = min(drawn, key=lambda one: one.loss)
    label = f"validation, best {best.loss:.4f} at step {best.step:,}"
    axes.plot([one.step for one in drawn], [one.loss for one in drawn], "o-", color=ORANGE, markersize=4, linewidth=1.0, label=label)


def smoothed(values: npt.NDArray[np.float64], reach: int) -> npt.NDArray[np.float64]:
    """The mean of each value and `reach` neighbours on both sides, or as many as both sides have: it never lags behind."""
    sums, at = np.cumsum(np.concatenate(([0.0], values))), np.arange(len(values))
    reaches = np.minimum(reach, np.minimum(at, len(values) - 1 - at))
    return np.asarray((sums[at + reaches + 1] - sums[at - reaches]) / (2 * reaches + 1))
