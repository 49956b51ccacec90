"""`dcnr up`: a whole local cluster in the foreground."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import click

from dcnr.cli.client import run
from dcnr.cli.cluster import BACKENDS, LocalCluster
from dcnr.cli.output import Command, data_dir_option, example, json_option, show_json

DEFAULT_PORT = 4222
PORT_HELP = f"Start a NATS server at this port; 0 for any free one.  [default: {DEFAULT_PORT}, or the server of $NATS_URL]"


@click.command(cls=Command, epilog=example("dcnr up --agents 3", "dcnr up --agents 2 --backend cupy --device 0 --device 1 --port 4333"))
@click.option("--agents", type=click.IntRange(1, 64), default=3, show_default=True, help="Agent processes.")
@click.option("--backend", type=click.Choice(BACKENDS), default="auto", show_default=True, help="What the agents compute on.")
@click.option("--device", "devices", type=click.IntRange(0), multiple=True, help="GPUs the agents take in turn (default: all the first).")
@click.option("--port", type=click.IntRange(0, 65535), help=PORT_HELP)
@data_dir_option
@json_option
def up(agents: int, backend: str, devices: tuple[int, ...], port: int | None, data_dir: Path, as_json: bool) -> None:
    """Run NATS server, orchestrator and agents on this machine until Ctrl-C. Whoever dies is started again."""
    if port is None and not os.environ.get("NATS_URL"):
        port = DEFAULT_PORT
    run(_up(LocalCluster(data_dir, agents, backend, port, devices), data_dir, as_json))


async def _up(cluster: LocalCluster, data_dir: Path, as_json: bool) -> None:
    async with cluster:
        if as_json:
            show_json({"event": "ready", "url": cluster.url, "agents": cluster.agents, "data_dir": str(data_dir)})
        else:
            click.echo(f"{len(cluster.agents)} agents are ready at {cluster.url}, logs in {data_dir / 'logs'}")
            click.echo(f"in another terminal: export NATS_URL={cluster.url} DCNR_DATA_DIR={data_dir}; dcnr pnode list")
            click.echo("Ctrl-C stops everything")
        await cluster.run_beside(asyncio.Event().wait(), lambda line: click.echo(line, err=True))
