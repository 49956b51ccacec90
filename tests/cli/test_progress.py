"""Each view shows what its reader needs."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from dcnr.bus.messages import StepMetrics, ValidationMetrics
from dcnr.cli.progress import BarView, JsonView, LineView, choose_view, describe
from dcnr.ids import SessionId


def row(step: int, loss: float = 2.0, skipped: bool = False) -> StepMetrics:
    """One step."""
    return StepMetrics(SessionId("s"), step, loss, 1e-3, 0.5, 1.0, skipped, 1234.5, 8.25)


def test_json_lines_have_exactly_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """One object a line, and nothing else on stdout."""
    with JsonView() as view:
        view.step(row(1))
        view.note("by the way")
        view.done("s", 2.0)
    seen = capsys.readouterr()
    step, done = map(json.loads, seen.out.splitlines())
    expected = {"event": "step", "step": 1, "loss": 2.0, "lr": 1e-3, "grad_norm": 0.5, "loss_scale": 1.0, "skipped": False}
    assert step == expected | {"tokens_per_s": 1234.5, "step_ms": 8.25}
    assert list(step)[:2] == ["event", "step"]
    assert done == {"event": "done", "session": "s", "final_loss": 2.0}
    assert seen.err == "by the way\n"


def test_json_says_how_else_a_run_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """People read that in the note or error."""
    JsonView().ended("s", "suspended", 4, "PNode a is gone")
    LineView(steps=9).ended("s", "suspended", 4, "PNode a is gone")
    BarView(steps=9).ended("s", "suspended", 4, "PNode a is gone")
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"event": "suspended", "session": "s", "step": 4, "reason": "PNode a is gone"}


def test_json_has_no_numbers_that_json_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    """NaN and infinity are null."""
    with JsonView() as view:
        view.step(row(1, loss=math.nan))
        view.step(row(2, loss=math.inf))
    assert [json.loads(line)["loss"] for line in capsys.readouterr().out.splitlines()] == [None, None]


VALIDATION = ValidationMetrics(SessionId("s"), 4, 1.5, 4.4817, 2.164, 1000, True)


def test_every_view_shows_a_validation(capsys: pytest.CaptureFixture[str]) -> None:
    """An event for scripts, a line for people, which says whether it is the best so far."""
    JsonView().validation(replace(VALIDATION, bits_per_byte=math.nan))
    seen = json.loads(capsys.readouterr().out)
    expected = {"step": 4, "loss": 1.5, "perplexity": 4.4817, "bits_per_byte": None, "tokens": 1000, "best": True}
    assert seen == {"event": "validation", **expected}
    LineView(steps=9).validation(VALIDATION)
    BarView(steps=9).validation(replace(VALIDATION, best=False))
    best, other = capsys.readouterr().out.splitlines()
    assert best == "step 4  validation loss 1.5000  perplexity 4.48  2.1640 bits/byte  (best so far)"
    assert other == best.removesuffix("  (best so far)")


def test_lines_show_first_last_and_skipped_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """The steps between are summed up by silence."""
    with LineView(steps=9) as view:
        for step in range(1, 10):
            view.step(row(step, skipped=step == 4))
        view.done("s", 2.0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/9", "step 4/9", "step 9/9", "session s is done, final loss 2.0000"]
    assert "skipped" in lines[1]


@pytest.mark.parametrize("width", [20, 28, 46, 80])
def test_what_a_narrow_terminal_does_not_hold_is_left_out_whole(width: int) -> None:
    """The loss always shows, and no number is cut."""
    words = describe(row(1)).split("  ")
    shown = describe(row(1), width).split("  ")
    assert shown == words[: len(shown)]
    assert len("  ".join(shown)) <= width
    assert len(shown) == len(words) or len("  ".join(words[: len(shown) + 1])) > width


@pytest.mark.parametrize("columns", ["60", "80", "140"])
def test_the_bar_fits_the_terminal(columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The count and the time that is left are never cut."""
    monkeypatch.setenv("COLUMNS", columns)
    with BarView(steps=10_000) as view:
        view.step(row(9_999))
    out = capsys.readouterr().out
    assert " 9999/10000 " in out
    assert "…" not in out
    assert re.search(r"ETA (\d|-):(\d\d|--):(\d\d|--)", out)


def test_the_bar_ends_with_the_farewell(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the terminal is none."""
    with BarView(steps=2) as view:
        view.step(row(1))
        view.step(row(2))
        view.note("[not markup]")
        view.done("s", None)
    out = capsys.readouterr().out
    assert "loss 2.0000" in out
    assert "[not markup]" in out
    assert out.splitlines()[-1] == "session s is done"


def test_a_pipe_gets_lines_and_scripts_get_json() -> None:
    """Under pytest stdout is no terminal."""
    assert isinstance(choose_view(3, as_json=False), LineView)
    assert isinstance(choose_view(3, as_json=True), JsonView)
