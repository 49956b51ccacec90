"""`dcnr session`: training runs of a cluster."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dcnr.cli.client import ask, ask_session, run
from dcnr.cli.follow import follow
from dcnr.cli.output import Group, example, json_option, show_record, show_table
from dcnr.cli.outputs import OutputPlan, output_options
from dcnr.cli.progress import choose_view
from dcnr.client.connect import connect
from dcnr.client.follow import Log
from dcnr.client.session import Session
from dcnr.data.batches import MAX_STEP
from dcnr.errors import UserError
from dcnr.ids import SessionId

POINTS = 2000
"""Of a run that is longer, a picture shows every so many steps."""
COLUMNS = ("session", "network", "dataset", "state", "step", "steps", "loss", "reason")


@click.group(cls=Group, epilog=example("dcnr session list"))
def session() -> None:
    """Training runs: list, watch, plot, suspend, resume, divide anew, delete."""


@session.command("list", epilog=example("dcnr session list", "dcnr session list --json"))
@json_option
def list_(as_json: bool) -> None:
    """Every session of the cluster."""
    show_table("sessions", [asdict(one) for one in ask(lambda cluster: cluster.sessions())], COLUMNS, as_json)


@session.command(epilog=example("dcnr session show tiny-1f6c2a"))
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Everything about one session."""
    show_record(asdict(ask_session(name, lambda one: one.show())), as_json)


@session.command(epilog=example("dcnr session watch tiny-1f6c2a", "dcnr session watch tiny-1f6c2a --csv run.csv --tensorboard runs/"))
@click.argument("name")
@output_options
@json_option
def watch(name: str, as_json: bool, **outputs: Any) -> None:
    """Follow a session until it ends. Ctrl-C stops watching; the session goes on.

    With --csv, --tensorboard or --wandb, steps that were done before are written too, and what an earlier watch wrote is gone on from.
    """
    run(_watch(SessionId(name), as_json, OutputPlan(**outputs)))


async def _watch(name: SessionId, as_json: bool, plan: OutputPlan) -> None:
    async with connect() as cluster:
        one = await cluster.session(name)
        steps = (await one.show()).steps
        with plan.open(name, new=False) as outputs, choose_view(steps, as_json) as view:
            await follow(one, view, outputs)


@session.command(epilog=example("dcnr session plot tiny-1f6c2a --out loss.png"))
@click.argument("name")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The .png, .svg or .pdf file to write.")
@json_option
def plot(name: str, out: Path, as_json: bool) -> None:
    """Draw the losses of a session: of each step, smoothed, and over the validation split."""
    from dcnr.metrics.plot import check_format, draw_losses  # a second, and several the first time: only for those who draw

    check_format(out)
    log = ask_session(name, _points)
    if not log.rows:
        raise UserError(f"session '{name}' has done no step that anybody knows of", f"watch it: dcnr session watch {name}")
    draw_losses(log.rows, log.validations, out)
    show_record({"session": name, "steps": log.rows[-1].step, "validations": len(log.validations), "out": str(out)}, as_json)


async def _points(one: Session) -> Log:
    """As many rows as a picture needs."""
    shown = await one.show()
    return await one.log(every=max(1, shown.step // POINTS))


@session.command(epilog=example("dcnr session suspend tiny-1f6c2a"))
@click.argument("name")
@json_option
def suspend(name: str, as_json: bool) -> None:
    """Write a checkpoint and let go of the PNodes; returns when that is done."""
    state = ask_session(name, lambda one: one.suspend(lambda text: click.echo(text, err=True)))
    show_record(asdict(state), as_json)


@session.command(epilog=example("dcnr session resume tiny-1f6c2a", "dcnr session resume tiny-1f6c2a --steps 2000"))
@click.argument("name")
@click.option("--steps", type=click.IntRange(1, MAX_STEP), help="A new total of steps.")
@json_option
def resume(name: str, steps: int | None, as_json: bool) -> None:
    """Go on from the last checkpoint."""
    show_record(asdict(ask_session(name, lambda one: one.resume(steps))), as_json)


@session.command(epilog=example("dcnr session rebalance tiny-1f6c2a"))
@click.argument("name")
@json_option
def rebalance(name: str, as_json: bool) -> None:
    """Divide a running session anew among the PNodes that there are now, at a checkpoint; no step is lost."""
    show_record(asdict(ask_session(name, lambda one: one.rebalance())), as_json)


@session.command(epilog=example("dcnr session delete tiny-1f6c2a"))
@click.argument("name")
@json_option
def delete(name: str, as_json: bool) -> None:
    """Forget a session and its checkpoints."""
    show_record(asdict(ask_session(name, lambda one: one.delete())), as_json)
