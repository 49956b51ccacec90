"""`dcnr chat`: a text that you and a trained network write in turns.

Rule 1: the network has no more than the text so far: your line, what it said, your next line. `--you` and `--reply` are put before the
turns, as in the text that it was trained on; its turn ends where yours would begin, or at the end of a line where turns have no names.
Rule 2: an empty line, Ctrl-D or Ctrl-C ends it.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import Any

import click

from dcnr.cli.client import run
from dcnr.cli.generate import sampling_options, stream, wanted, write
from dcnr.cli.output import Command, example, in_thread
from dcnr.client.cluster import Cluster
from dcnr.client.connect import connect
from dcnr.errors import UserError

PROMPT = "> "


@dataclass(frozen=True, slots=True)
class Turns:
    """What stands before your lines, and before its."""

    you: str
    reply: str

    @property
    def stop(self) -> str:
        """What its turn ends with."""
        return f"\n{self.you}" if self.you else "\n"

    def asked(self, text: str, line: str) -> str:
        """The text so far and your line, up to where it goes on."""
        return f"{text}{self.you}{line}\n{self.reply}"

    def answered(self, asked: str, answer: str) -> str:
        """The text after its turn."""
        return f"{asked}{answer}\n"


@click.command(
    cls=Command, epilog=example("dcnr chat tiny-1f6c2a", 'dcnr chat tiny-1f6c2a --you "ROMEO: " --reply "JULIET: " --temperature 0.7')
)
@click.argument("source")
@click.option("--you", default="", help='What stands before your lines, such as "User: ".')
@click.option("--reply", default="", help='What stands before the answers, such as "Assistant: ".')
@sampling_options
def chat(source: str, you: str, reply: str, **options: Any) -> None:
    """Talk to a trained network, line by line. An empty line ends it.

    SOURCE is a session, whose newest checkpoint is read, or SESSION@STEP.
    """
    turns = Turns(you, reply)
    fields = wanted(source, options)
    run(_chat({**fields, "stop": [*fields["stop"], turns.stop]}, turns))


async def _chat(fields: dict[str, Any], turns: Turns) -> None:
    async with connect() as cluster:
        text = ""
        while line := await line_typed():
            text = await _turn(cluster, {**fields, "prompt": turns.asked(text, line)}, turns)


async def line_typed() -> str:
    """What you type, without its line break; empty at the end."""
    if sys.stdin.isatty():
        click.echo(PROMPT, nl=False)
    try:
        line: str = await asyncio.wrap_future(in_thread(sys.stdin.readline))
    except UnicodeDecodeError as error:
        raise UserError("stdin: invalid UTF-8", "give UTF-8 text") from error
    return line.rstrip("\r\n")


async def _turn(cluster: Cluster, fields: dict[str, Any], turns: Turns) -> str:
    answer, _ = await stream(cluster, fields, write, turns.reply)
    return turns.answered(fields["prompt"], answer)
