"""`dcnr metrics`: what the cluster publishes about itself, as it happens."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import click

from dcnr.bus import subjects
from dcnr.bus.codec import decode
from dcnr.cli.client import run
from dcnr.cli.output import Group, example, json_option, show_json
from dcnr.client.connect import connection
from dcnr.errors import PeerError


@click.group(cls=Group, epilog=example("dcnr metrics tail"))
def metrics() -> None:
    """Live metrics."""


@metrics.command(epilog=example("dcnr metrics tail", "dcnr metrics tail 'dcnr.metrics.step.*' --json"))
@click.argument("subject", default=subjects.METRICS)
@json_option
def tail(subject: str, as_json: bool) -> None:
    """Print metrics until Ctrl-C. SUBJECT may hold the wildcards * and >; by default everything."""
    run(_tail(subject, as_json))


async def _tail(subject: str, as_json: bool) -> None:
    news: asyncio.Queue[bytes] = asyncio.Queue()
    async with connection() as bus:
        await bus.subscribe(subject, news.put_nowait)
        click.echo(f"listening to {subject} until Ctrl-C", err=True)
        while True:
            try:
                message = decode(await news.get())
            except PeerError as error:
                click.echo(f"a metric could not be read: {error}", err=True)
                continue
            fields = {"kind": type(message).__name__, **asdict(message)}
            if as_json:
                show_json(fields)
            else:
                click.echo("  ".join(f"{name}={_short(value)}" for name, value in fields.items() if value != ""))


def _short(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
