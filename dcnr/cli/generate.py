"""`dcnr generate`: text from a checkpoint, token by token, through the VNodes of the cluster.

Rule 1: the prompt and what follows it go to stdout as they come; why nothing comes, to stderr.
Rule 2: SOURCE is a session, whose newest checkpoint is read, or SESSION@STEP.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from dcnr.cli.client import run, session_and_step
from dcnr.cli.output import Command, example, json_option, show_json, unescaped
from dcnr.client.cluster import Cluster
from dcnr.client.connect import connect
from dcnr.client.generation import Piece

F = TypeVar("F", bound=Callable[..., Any])
Show = Callable[[str], None]

STOP = r"""End before this text, in which \n is a newline and \t a tab; may be given several times. A text ends in any case where its
document does, if the tokenizer has a token for that."""


def sampling_options(command: F) -> F:
    """How the next token is chosen, and when it ends."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS = (
    click.option("--temperature", type=click.FloatRange(min=0), default=0.8, show_default=True, help="0: always the likeliest token."),
    click.option("--top-k", type=click.IntRange(min=0), default=0, help="Only of the so many likeliest tokens.  [default: all]"),
    click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Of the likeliest of this share.  [default: 1]"),
    click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="At most so many tokens."),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The same seed gives the same text."),
    click.option("--stop", multiple=True, help=STOP),
    click.option("--no-cache", is_flag=True, help="Read the whole window again for every token, to compare."),
    click.option("--pnodes", type=click.IntRange(min=0), default=0, help="Spread over so many PNodes.  [default: as few as hold it]"),
)  # fmt: skip


@click.command(
    cls=Command,
    epilog=example('dcnr generate tiny-1f6c2a --prompt "Once upon a time"', "dcnr generate tiny-1f6c2a@500 --prompt def --temperature 0"),
)
@click.argument("source")
@click.option("--prompt", required=True, help="The text to go on from.")
@sampling_options
@json_option
def generate(source: str, prompt: str, as_json: bool, **options: Any) -> None:
    """Let a trained network go on with a text.

    SOURCE is a session, whose newest checkpoint is read, or SESSION@STEP.
    """
    run(_generate({**wanted(source, options), "prompt": prompt}, as_json))


def wanted(source: str, options: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request, but for its prompt. Raises `UserError` for a source that is none."""
    session, step = session_and_step(source)
    given = {name: value for name, value in options.items() if name not in ("no_cache", "stop")}
    stop = [unescaped(text) for text in options["stop"]]
    return {**given, "session": session, "step": step, "stop": stop, "cache": not options["no_cache"]}


async def _generate(fields: dict[str, Any], as_json: bool) -> None:
    async with connect() as cluster:
        text, last = await stream(cluster, fields, (lambda _text: None) if as_json else write, fields["prompt"])
    if as_json:
        show_json({"prompt": fields["prompt"], "text": text, "tokens": last.tokens, "positions": last.positions, "ended": last.reason})


def write(text: str) -> None:
    """To the terminal, now. A pipe that cannot hold it gets the nearest that it can."""
    encoding = sys.stdout.encoding or "utf-8"
    click.echo(text.encode(encoding, "replace").decode(encoding), nl=False)


async def stream(cluster: Cluster, fields: dict[str, Any], show: Show, before: str) -> tuple[str, Piece]:
    """The whole text, and the last piece. `show` gets `before` and each piece as it comes, and then the end of the line.

    Until there is text, it gets nothing: a refusal shows no prompt, and why nothing comes does not stand in its line.
    """
    text, said, shown, last = "", "", False, Piece("", 0, 0, 0, True, False, "", "")
    try:
        async for last in cluster.pieces(**fields):
            text += last.text
            if last.text or last.done:
                show(last.text if shown else before + last.text)
                shown = True
            if last.waits and last.waits != said:
                said = last.waits
                click.echo(said, err=True)
    finally:
        if shown:  # what comes next, an error too, begins a line
            show("\n")
    return text, last
