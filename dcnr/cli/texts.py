"""What the commands that read text share: where it comes from, and how it is read."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import click

from dcnr.cli.output import unescaped
from dcnr.text.documents import FORMATS, Format, Reading

F = TypeVar("F", bound=Callable[..., Any])

STDIN = "-"


def reading_options(command: F) -> F:
    """Add what `reading_of` takes."""
    options = (
        click.option("--format", type=click.Choice(FORMATS), help="Of all files, where their names do not say it."),
        click.option("--field", default="text", show_default=True, help="Where the text is in a line of JSONL, a row of Parquet."),
        click.option("--separator", help=r"What stands between two documents of a text file; \n is a newline, \t a tab."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def reading_of(format: Format | None, field: str, separator: str | None) -> Reading:
    """What these options say."""
    return Reading(format, field, None if separator is None else unescaped(separator))


@contextmanager
def with_stdin(paths: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """`paths`, where `-` and every pipe is a file of what comes from it, since text is read more than once."""
    with tempfile.TemporaryDirectory(prefix="dcnr-stdin-") as folder:
        yield tuple(_spooled(path, Path(folder) / str(number)) for number, path in enumerate(paths))


def _spooled(path: str, file: Path) -> str:
    if path != STDIN and not Path(path).is_fifo():
        return path
    with nullcontext(sys.stdin.buffer) if path == STDIN else Path(path).open("rb") as source, file.open("wb") as kept:
        shutil.copyfileobj(source, kept, 1 << 20)
    return str(file)
