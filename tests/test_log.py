"""Log lines."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import structlog

from dcnr.log import configure


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    """Logging is as before after each test."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_json_lines_hold_level_time_and_what_was_bound(capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, so that stdout stays for results."""
    configure("json")
    structlog.contextvars.bind_contextvars(pnode="p1")
    structlog.get_logger().info("ready", port=4222)
    captured = capsys.readouterr()
    fields = json.loads(captured.err)
    assert captured.out == ""
    assert fields.pop("timestamp").endswith("Z")
    assert fields == {"event": "ready", "level": "info", "pnode": "p1", "port": 4222}


def test_console_lines_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """No colours where stderr is no terminal."""
    configure("console")
    structlog.get_logger().warning("late", step=3)
    line = capsys.readouterr().err
    assert "late" in line
    assert "step=3" in line
    assert "\x1b" not in line


def test_lower_levels_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """At warning, info is silent."""
    configure("json", "warning")
    structlog.get_logger().info("quiet")
    assert capsys.readouterr().err == ""


def test_a_traceback_stays_on_its_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    """One event, one line."""
    configure("json")
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger().exception("failed")
    assert "ValueError: broken" in json.loads(capsys.readouterr().err)["exception"]
