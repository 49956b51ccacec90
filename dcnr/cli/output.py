"""What every command shares: how it prints, and how it fails.

Rule 1: results go to stdout; with `--json` as one JSON object a line, else for people. Errors and progress go to stderr.
Rule 2: an error is a message and a remedy, never a traceback. Exit code 2 if the user can mend it, 130 after Ctrl-C, else 1.
Rule 3: every command is made by `Group` (or `Command`), which applies rule 2, and has `epilog=example(...)`.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dcnr.config import from_environment
from dcnr.errors import DcnrError, UserError
from dcnr.signals import INTERRUPTED

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
OnProgress = Callable[[int, int], None]
"""Called with (done, total)."""

_PIPE_WIDTH = 4096
"""Columns of a table that goes to a file or pipe: enough never to cut a cell."""


class Failure(click.ClickException):
    """Our error, as click shows it: one message on stderr, exit code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Write `error: …`."""
        click.echo(f"error: {self.message}", file=file, err=True)


class UserFailure(Failure):
    """The same for what the user can mend: exit code 2."""

    exit_code = 2


class Command(click.Command):
    """A command whose errors end it with one message and the right exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except DcnrError as error:
            failure = UserFailure if isinstance(error, UserError) else Failure
            raise failure(str(error)) from error
        except BrokenPipeError:
            raise
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise UserFailure(f"{where}{error.strerror or error}") from error
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None


class Group(click.Group):
    """A noun, or the program itself; its commands are of our kind."""

    command_class = Command
    group_class = type


def example(*lines: str) -> str:
    """The epilog that shows how a command is used."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def json_option(command: F) -> F:
    """Add `--json` as the argument `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")(command)


def data_dir_option(command: F) -> F:
    """Add `--data-dir` (or $DCNR_DATA_DIR) as the argument `data_dir`, an absolute `Path`."""
    return click.option(
        "--data-dir",
        type=click.Path(file_okay=False, path_type=Path),
        envvar="DCNR_DATA_DIR",
        callback=lambda context, option, value: from_environment(value).data_dir,
        show_default="~/.dcnr",
        show_envvar=True,
        help="Where tokenizers, datasets and checkpoints are kept.",
    )(command)


def show_json(fields: Mapping[str, object]) -> None:
    """One JSON line on stdout."""
    click.echo(json.dumps(fields, ensure_ascii=False))


def show_record(fields: Mapping[str, object], as_json: bool) -> None:
    """One thing: a JSON line, or its fields one below the other."""
    if as_json:
        show_json(fields)
        return
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        click.echo(f"{name:<{width}}  {_cell(value)}")


def show_table(name: str, rows: Sequence[Mapping[str, object]], columns: Sequence[str], as_json: bool) -> None:
    """Many things: `{name: rows}` as a JSON line (all fields), or a table of `columns`."""
    if as_json:
        show_json({name: [dict(row) for row in rows]})
        return
    if not rows:
        click.echo(f"no {name}")
        return
    table = Table(box=None, pad_edge=False)
    for column in columns:
        number = all(isinstance(row.get(column), int | float) for row in rows)
        table.add_column(Text(column), justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(_cell(row.get(column))) for column in columns))
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)


def _cell(value: object) -> str:
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.6g}"
        case list() | tuple():
            return ", ".join(map(_item, value))
        case dict():
            return "  ".join(f"{key}={_cell(one)}" for key, one in value.items())
        case _:
            return str(value)


def _item(value: object) -> str:
    """A cell of a list; a list in a list is a shape."""
    return "×".join(map(str, value)) if isinstance(value, list | tuple) else _cell(value)


def unescaped(text: str) -> str:
    r"""An option as its user means it: \n is a newline, \t a tab, which shells pass on as they are written."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


@contextmanager
def progress(what: str) -> Iterator[OnProgress]:
    """A progress bar on stderr while the block runs; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def tell_skipped(files: int) -> None:
    """One line about files of a folder that are no text, if there are any."""
    if files:
        click.echo(f"skipped {files} {'file that is' if files == 1 else 'files that are'} not UTF-8 text", err=True)


def interruptible(work: Callable[[], T]) -> T:
    """The result of `work`, which may spend long in a library that does not return to Python: Ctrl-C leaves it behind.

    So `work` must not leave anything half-made, wherever it stops.
    """
    return in_thread(work).result()


def in_thread(work: Callable[[], T]) -> Future[T]:
    """The coming result of `work`, done in a thread that does not keep the program from ending."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001  not handled here, but handed to the caller's thread
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result
