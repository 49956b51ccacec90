"""Each view shows what its reader needs."""

from __future__ import annotations

import json
import math
import re

import pytest

from dcnr.bus.messages import StepMetrics, ValidationMetrics
from dcnr.cli.progress import BarView, JsonView, LineView, choose_view, describe
from dcnr.ids import SessionId

VALIDATION = ValidationMetrics(SessionId("s"), 4, 1.5, 4.4817, 2.125, 1000, True)


def row(step: int, loss: float = 2.0, skipped: bool = False, mfu: float | None = None) -> StepMetrics:
    """One step."""
    return StepMetrics(SessionId("s"), step, loss, 1e-3, 0.5, 1.0, skipped, 1234.5, 8.25, mfu=mfu)


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


def test_mfu_is_said_where_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """Nowhere else is there a word of it."""
    assert "MFU 45.3%" in describe(row(1, mfu=0.453))
    assert "MFU" not in describe(row(1))
    JsonView().step(row(1, mfu=0.453))
    assert json.loads(capsys.readouterr().out)["mfu"] == 0.453


def test_a_validation_is_shown_by_every_view(capsys: pytest.CaptureFixture[str]) -> None:
    """As an object, as a line, above the bar."""
    JsonView().validation(VALIDATION)
    said = {"step": 4, "loss": 1.5, "perplexity": 4.4817, "bits_per_byte": 2.125, "tokens": 1000, "best": True}
    assert json.loads(capsys.readouterr().out) == {"event": "validation", **said}
    line = "step 4  validation loss 1.5000  perplexity 4.48  2.1250 bits/byte  (best so far)\n"
    LineView(steps=9).validation(VALIDATION)
    assert capsys.readouterr().out == line
    with BarView(steps=9) as view:
        view.validation(VALIDATION)
    assert line in capsys.readouterr().out


def test_lines_say_how_long_it_will_take(capsys: pytest.CaptureFixture[str]) -> None:
    """From the mean time of the last steps; the last line needs it no more."""
    with LineView(steps=400_001) as view:
        view.step(row(1))
        view.step(row(400_001))
    first, last = capsys.readouterr().out.splitlines()
    assert first.endswith("8 ms  ETA 0:55:00")
    assert "ETA" not in last


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
