"""The program finds its commands, is quick to help, and fails in one line."""

from __future__ import annotations

import importlib
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from dcnr.cli.main import COMMANDS, main


def walk(command: click.Command, name: str) -> list[tuple[str, click.Command]]:
    """Every command that does something, with its whole name."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        children = [(child, command.get_command(context, child)) for child in command.list_commands(context)]
        return [found for child, inner in children if inner is not None for found in walk(inner, f"{name} {child}")]
    return [(name, command)]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_exists(name: str) -> None:
    """A row of the table names a click command."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    assert isinstance(getattr(importlib.import_module(module), attribute), click.Command)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_an_example(name: str) -> None:
    """`--help` of each command, and of each of its own, exits 0 and shows how it is used."""
    command = main.get_command(click.Context(main), name)
    assert command is not None
    for whole, inner in walk(command, name):
        result = CliRunner().invoke(main, [*whole.split(), "--help"])
        assert result.exit_code == 0, whole
        assert "Example" in result.output, whole
        assert inner.help, whole


def test_help_imports_no_command() -> None:
    """Help of the program is there at once, since it needs nothing but click."""
    program = "import sys; from dcnr.cli.main import main\nmain(['--help'], standalone_mode=False)\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "demo" in done.stdout
    assert not loaded & {"asyncio", "numpy", "rich", "pydantic", "dcnr.cli.train"}


def test_an_unknown_command_is_a_usage_error() -> None:
    """Exit code 2 and the name."""
    result = CliRunner().invoke(main, ["trian"])
    assert result.exit_code == 2
    assert "trian" in result.output


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (["train"], "error: Missing argument 'NETWORK|FILE.yml' (see `dcnr train --help`)"),
        (["session", "bogus"], "error: No such command 'bogus' (see `dcnr session --help`)"),
        (["up", "--agents", "x"], "error: Invalid value for '--agents': 'x' is not a valid integer range (see `dcnr up --help`)"),
    ],
)
def test_a_wrong_call_is_answered_in_one_line(call: list[str], line: str) -> None:
    """As every other error, with exit code 2."""
    result = CliRunner().invoke(main, call)
    assert (result.exit_code, result.stderr) == (2, f"{line}\n")


def test_a_noun_alone_shows_its_help() -> None:
    """What one can do with it."""
    assert "Commands:" in CliRunner().invoke(main, ["session"]).output
