"""Sides of a comparison answer when they are asked, and are told apart from ones that ended."""

from __future__ import annotations

from pathlib import Path

import pytest
import turns
from turns import measure, side

ECHO = """
import sys
sys.path.insert(0, {folder!r})
from turns import take_turns
take_turns({{"name": "echo"}}, lambda steps: {{"ms": 2 * steps}})
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for `bench/`."""
    (tmp_path / "echo.py").write_text(ECHO.format(folder=str(Path(turns.__file__).parent)))
    (tmp_path / "ends.py").write_text("print('{}', flush=True); raise SystemExit(3)")
    monkeypatch.setattr(turns, "__file__", str(tmp_path / "turns.py"))
    return tmp_path


async def test_a_side_says_what_it_is_and_takes_its_turns(scripts: Path) -> None:
    """One line when it is ready, one for each turn."""
    async with side("echo", ["echo.py"], {}) as one:
        assert one.ready == {"name": "echo"}
        assert [await one.turn(steps) for steps in (1, 5)] == [{"ms": 2}, {"ms": 10}]


async def test_a_side_that_ended_is_an_error_with_its_exit_code(scripts: Path) -> None:
    """Instead of a result that never comes."""
    async with side("ends", ["ends.py"], {}) as one:
        with pytest.raises(RuntimeError, match="ends ended with exit code 3"):
            await one.hear()


def test_measured_steps_are_warmed_up_and_waited_for() -> None:
    """Of 10 steps 6 run first, 10 one by one with a wait each, 10 back to back with one wait."""
    events: list[str] = []
    median, back_to_back = measure(lambda: events.append("run"), lambda: events.append("wait"), 10)
    assert median >= 0
    assert back_to_back >= 0
    assert events == ["run"] * 6 + ["wait"] + ["run", "wait"] * 10 + ["run"] * 10 + ["wait"]
