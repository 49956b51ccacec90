"""How commands print and fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dcnr.cli.output import (
    Group,
    data_dir_option,
    example,
    interruptible,
    json_option,
    progress,
    show_record,
    show_table,
)
from dcnr.errors import BackendUnavailable, DcnrError, NotFound, UserError

ROWS = [{"name": "a", "tokens": 1234, "loss": 0.123456789, "tied": True}, {"name": "bb", "tokens": 5, "loss": None, "tied": False}]


@click.group(cls=Group)
def program() -> None:
    """A program of one command."""


@program.command(epilog=example("program fail user"))
@click.argument("how")
def fail(how: str) -> None:
    """Raise what was asked for."""
    raise {
        "user": UserError("no such thing", "make one"),
        "found": NotFound("nowhere"),
        "backend": BackendUnavailable("no GPU"),
        "disk": PermissionError(13, "Permission denied", "/x/y"),
        "ctrl-c": KeyboardInterrupt(),
    }[how]


@pytest.mark.parametrize(
    ("how", "code", "line"),
    [
        ("user", 2, "error: no such thing (make one)\n"),
        ("found", 2, "error: nowhere\n"),
        ("backend", 1, "error: no GPU\n"),
        ("disk", 2, "error: /x/y: Permission denied\n"),
        ("ctrl-c", 130, ""),
    ],
)
def test_an_error_is_one_line_on_stderr_and_an_exit_code(how: str, code: int, line: str) -> None:
    """Never a traceback, never on stdout."""
    result = CliRunner().invoke(program, ["fail", how])
    assert (result.exit_code, result.stderr, result.stdout) == (code, line, "")


def test_help_shows_an_example_as_it_was_written() -> None:
    """Lines are not wrapped."""
    assert "Example:\n    program fail user\n" in CliRunner().invoke(program, ["fail", "--help"]).output


def test_a_record_is_lines_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers are grouped for people only."""
    fields = {"name": "é", "tokens": 1234567, "parts": [1, "b"], "none": None, "loss": 0.125}
    show_record(fields, as_json=False)
    assert capsys.readouterr().out == "name    é\ntokens  1,234,567\nparts   1, b\nnone    -\nloss    0.125\n"
    nested = {"shapes": [(64, 1024), (3,)], "hyper": {"lr": 0.1, "of": ["a", "b"]}, "reason": ""}
    show_record(nested, as_json=False)
    assert capsys.readouterr().out == "shapes  64×1024, 3\nhyper   lr=0.1  of=a, b\nreason  -\n"
    show_record(fields, as_json=True)
    line = capsys.readouterr().out
    assert json.loads(line) == fields
    assert line.count("\n") == 1


def test_a_table_is_aligned_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers to the right; nothing is cut where stdout is no terminal."""
    long = {"name": "x" * 300, "tokens": 1, "loss": 1.0, "tied": False}
    show_table("things", [*ROWS, long], ("name", "tokens", "loss", "tied"), as_json=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["name", "tokens", "loss", "tied"],
        ["a", "1,234", "0.123457", "yes"],
        ["bb", "5", "-", "no"],
        ["x" * 300, "1", "1", "no"],
    ]


def test_a_table_in_json_has_all_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """Under its name, on one line."""
    show_table("things", ROWS, ("name",), as_json=True)
    assert json.loads(capsys.readouterr().out) == {"things": ROWS}


def test_an_empty_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """In JSON it is an empty list."""
    show_table("things", [], ("name",), as_json=False)
    show_table("things", [], ("name",), as_json=True)
    assert capsys.readouterr().out == 'no things\n{"things": []}\n'


def test_markup_in_a_cell_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    """A name from a file cannot colour or break the table."""
    show_table("things", [{"name": "[red]x[/nope]"}], ("name",), as_json=False)
    assert "[red]x[/nope]" in capsys.readouterr().out


def test_the_data_directory_comes_from_option_environment_or_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In that order."""

    @click.command()
    @data_dir_option
    @json_option
    def where(data_dir: Path, as_json: bool) -> None:
        click.echo(f"{data_dir} {as_json}")

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DCNR_DATA_DIR", raising=False)
    assert CliRunner().invoke(where, []).output == f"{tmp_path / '.dcnr'} False\n"
    monkeypatch.setenv("DCNR_DATA_DIR", str(tmp_path / "env"))
    assert CliRunner().invoke(where, []).output == f"{tmp_path / 'env'} False\n"
    assert CliRunner().invoke(where, ["--data-dir", str(tmp_path / "o"), "--json"]).output == f"{tmp_path / 'o'} True\n"


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts and logs see nothing of it."""
    with progress("working") as on_progress:
        on_progress(1, 2)
    assert capsys.readouterr() == ("", "")


def test_interruptible_work_gives_its_result_or_its_error() -> None:
    """As if it had been called, whatever the error is."""
    assert interruptible(lambda: 3) == 3
    for error in (DcnrError("a"), OSError("b"), ZeroDivisionError("c")):

        def broken(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error), match=str(error)):
            interruptible(broken)


BUSY = """
import threading
from dcnr.cli.output import Command, interruptible
import click

@click.command(cls=Command)
def busy():
    print("started", flush=True)
    interruptible(threading.Event().wait)

busy()
"""


def test_ctrl_c_leaves_work_behind_that_does_not_return() -> None:
    """The process ends well within 3 s, with the code of Ctrl-C."""
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ))
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, b"")
    assert time.monotonic() - began < 3
