"""`dcnr session`: training runs of a cluster."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from dcnr.bus.api import call
from dcnr.cli.client import ask, connection, run
from dcnr.cli.follow import AWAY, follower
from dcnr.cli.output import Group, example, json_option, show_record, show_table
from dcnr.cli.progress import choose_view
from dcnr.data.batches import MAX_STEP
from dcnr.errors import BusUnavailable, WorldError
from dcnr.ids import SessionId

ASK_EVERY = 0.1
"""Seconds between two looks at whether a session is suspended."""
COLUMNS = ("session", "network", "dataset", "state", "step", "steps", "loss", "reason")


@click.group(cls=Group, epilog=example("dcnr session list"))
def session() -> None:
    """Training runs: list, watch, suspend, resume, divide anew, delete."""


@session.command("list", epilog=example("dcnr session list", "dcnr session list --json"))
@json_option
def list_(as_json: bool) -> None:
    """Every session of the cluster."""
    show_table("sessions", ask("session.list")["sessions"], COLUMNS, as_json)


@session.command(epilog=example("dcnr session show tiny-1f6c2a"))
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Everything about one session."""
    show_record(ask("session.show", session=name), as_json)


@session.command(epilog=example("dcnr session watch tiny-1f6c2a", "dcnr session watch tiny-1f6c2a --json"))
@click.argument("name")
@json_option
def watch(name: str, as_json: bool) -> None:
    """Follow a session until it ends. Ctrl-C stops watching; the session goes on."""
    run(_watch(SessionId(name), as_json))


async def _watch(name: SessionId, as_json: bool) -> None:
    async with connection() as bus, follower(bus, name) as one:
        shown = await call(bus, "session.show", session=name)
        with choose_view(shown["steps"], as_json) as view:
            await one.follow(view, old=True)


@session.command(epilog=example("dcnr session suspend tiny-1f6c2a"))
@click.argument("name")
@json_option
def suspend(name: str, as_json: bool) -> None:
    """Write a checkpoint and let go of the PNodes; returns when that is done."""
    show_record(run(_suspend(name)), as_json)


async def _suspend(name: str) -> dict[str, Any]:
    async with connection() as bus:
        answer = await call(bus, "session.suspend", session=name)
        away = False
        while answer["state"] == "suspending":
            await asyncio.sleep(ASK_EVERY)
            try:
                answer = {key: (await call(bus, "session.show", session=name))[key] for key in answer}
            except (BusUnavailable, WorldError):  # what was asked is written down: the next orchestrator goes on with it
                if not away:
                    click.echo(AWAY, err=True)
                away = True
        return answer


@session.command(epilog=example("dcnr session resume tiny-1f6c2a", "dcnr session resume tiny-1f6c2a --steps 2000"))
@click.argument("name")
@click.option("--steps", type=click.IntRange(1, MAX_STEP), help="A new total of steps.")
@json_option
def resume(name: str, steps: int | None, as_json: bool) -> None:
    """Go on from the last checkpoint."""
    more = {} if steps is None else {"steps": steps}
    show_record(ask("session.resume", session=name, **more), as_json)


@session.command(epilog=example("dcnr session rebalance tiny-1f6c2a"))
@click.argument("name")
@json_option
def rebalance(name: str, as_json: bool) -> None:
    """Divide a running session anew among the PNodes that there are now, at a checkpoint; no step is lost."""
    show_record(ask("session.rebalance", session=name), as_json)


@session.command(epilog=example("dcnr session delete tiny-1f6c2a"))
@click.argument("name")
@json_option
def delete(name: str, as_json: bool) -> None:
    """Forget a session and its checkpoints."""
    show_record(ask("session.delete", session=name), as_json)
