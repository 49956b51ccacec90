"""`dcnr orchestrator`: the process that places, trains and watches."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from pathlib import Path

import click
import numpy as np
import uvloop

from dcnr import log
from dcnr.bus.messages import Hop
from dcnr.bus.nats import connect
from dcnr.bus.transport import HopTransport, host_id
from dcnr.clock import MonotonicClock
from dcnr.config import Config, from_environment
from dcnr.errors import DcnrError, UserError
from dcnr.ids import PNodeId, check_id
from dcnr.orchestrator.identity import ACCEPT, VARIABLE
from dcnr.orchestrator.shell import Outside, Shell
from dcnr.signals import on_interrupt
from dcnr.storage.base import open_storage

GRACE = 2.5
"""Seconds from the request to stop to the end, whatever happens."""


@click.command(epilog="\b\nExample:\n  dcnr orchestrator --data-dir ./data --nats nats://127.0.0.1:4222")
@click.option(
    "--data-dir", type=click.Path(file_okay=False, path_type=Path), help="Datasets and checkpoints (default: $DCNR_DATA_DIR or ~/.dcnr)."
)
@click.option("--storage", help="URL of the checkpoints: file:///path or s3://bucket/path (default: $DCNR_STORAGE or the data directory).")
@click.option("--nats", "nats_url", help="The NATS server (default: $NATS_URL or nats://127.0.0.1:4222).")
@click.option("--name", default="orchestrator", show_default=True, help="How it is called in logs.")
@click.option(ACCEPT, "accept", is_flag=True, envvar=VARIABLE, help="Begin anew although the server has lost all networks and sessions.")
def orchestrator(data_dir: Path | None, storage: str | None, nats_url: str | None, name: str, accept: bool) -> None:
    """Run an orchestrator. Any number may run; one leads, the others stand by."""
    log.configure()
    try:
        me = PNodeId(check_id(f"{name}-{secrets.token_hex(4)}", "orchestrator"))
        uvloop.run(_until_stopped(me, from_environment(data_dir, nats_url, storage), accept))
    except DcnrError as error:
        click.echo(f"error: {error}", err=True)
        raise click.exceptions.Exit(2 if isinstance(error, UserError) else 1) from error


async def _until_stopped(me: PNodeId, config: Config, accept: bool) -> None:
    """Run until SIGINT or SIGTERM; a second one, or an end that takes too long, ends the process at once."""
    work = asyncio.ensure_future(_serve(me, config, accept))
    on_interrupt(work.cancel, GRACE)
    with suppress(asyncio.CancelledError):
        await work


async def _serve(me: PNodeId, config: Config, accept: bool) -> None:
    storage = open_storage(config.storage)
    control = await connect(config.nats_url, me, patient=True)
    try:
        tensors = await connect(config.nats_url, f"{me}-tensors", patient=True)
        try:
            hops: asyncio.Queue[tuple[Hop, np.ndarray]] = asyncio.Queue()
            transport = HopTransport(tensors, me, host_id(), lambda hop, payload: hops.put_nowait((hop, payload)))
            try:
                await Shell(Outside(control, transport, storage, config.data_dir, me, MonotonicClock(), hops)).run(accept)
            finally:
                await transport.close()
        finally:
            await tensors.close()
    finally:
        await control.close()
