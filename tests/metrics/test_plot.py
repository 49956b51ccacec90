"""A picture of the losses: what it shows, and that it is a picture."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from dcnr.errors import UserError
from dcnr.metrics.plot import check_format, draw_losses, smoothed
from tests.metrics.rows import step, validation


def test_a_picture_says_what_it_shows(tmp_path: Path) -> None:
    """Title, axes, both lines and the best validation, as text in an SVG."""
    out = tmp_path / "loss.svg"
    rows = [step(number, loss=5 / number) for number in range(1, 301)]
    draw_losses(rows, [validation(100, loss=1.5), validation(200, loss=1.25), validation(300, loss=1.375)], out)
    drawn = set(re.findall(r"<!-- (.*?) -->", out.read_text()))
    assert {"session s", "step", "loss", "loss of a step", "smoothed over 13 steps", "validation, best 1.2500 at step 200"} <= drawn


def test_few_steps_have_one_line_and_losses_that_are_no_numbers_have_no_point(tmp_path: Path) -> None:
    """Nothing to smooth, no validation in the legend."""
    out = tmp_path / "loss.svg"
    draw_losses([step(1), step(2, loss=math.inf), step(3, loss=math.nan), step(4)], [], out)
    drawn = set(re.findall(r"<!-- (.*?) -->", out.read_text()))
    assert "loss of a step" in drawn
    assert not any("smoothed" in text or "validation" in text for text in drawn)


@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_ending_says_what_kind_of_picture_it_is(ending: str, begins: bytes, tmp_path: Path) -> None:
    """And another ending is refused."""
    out = tmp_path / f"loss.{ending}"
    check_format(out)
    draw_losses([step(1)], [validation(1)], out)
    assert out.read_bytes().startswith(begins)
    with pytest.raises(UserError, match=r"\.png, \.svg, \.pdf"):
        check_format(tmp_path / "loss.gif")


def test_smoothing_is_the_mean_of_the_values_around() -> None:
    """As many on both sides, so that a falling line is not lifted, also at its ends."""
    assert smoothed(np.array([4.0, 2.0, 0.0, 1.0]), 1).tolist() == [4.0, 2.0, 1.0, 1.0]
    straight = np.arange(20.0)
    assert smoothed(straight, 6) == pytest.approx(straight)
