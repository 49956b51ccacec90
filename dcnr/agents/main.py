"""`dcnr-agent`: one process that hosts VNodes on one device."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import secrets
from typing import get_args

import click
import psutil
import uvloop

from dcnr import __version__, log
from dcnr.agents.shell import Shell
from dcnr.backends.base import Backend
from dcnr.backends.load import BackendName, load_backend
from dcnr.bus.messages import PNodeInfo
from dcnr.bus.nats import connect
from dcnr.bus.transport import host_id
from dcnr.clock import MonotonicClock
from dcnr.config import from_environment
from dcnr.errors import BackendUnavailable, DcnrError, UserError
from dcnr.ids import PNodeId, check_id
from dcnr.signals import on_interrupt

DEFAULT_MEMORY = "80%"
"""Of what the device has: what an agent may hold."""
GRACE = 1.9
"""Seconds from the request to stop to the end, whatever happens."""

_UNITS = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 10**3,
    "m": 1 << 20, "mib": 1 << 20, "mb": 10**6,
    "g": 1 << 30, "gib": 1 << 30, "gb": 10**9,
    "t": 1 << 40, "tib": 1 << 40, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*|%)\s*")


def parse_memory(text: str, total: int) -> int:
    """Bytes of `8GiB`, `512 MB`, `1.5g`, or of `40%` of `total`. Raises `UserError`."""
    match = _SIZE.fullmatch(text)
    units = _UNITS | {"%": total / 100}
    if match is None or match[2].lower() not in units:
        raise UserError(f"'{text}' is not an amount of memory", "write it like 8GiB, 512MiB, 2GB or 40%")
    size = int(float(match[1]) * units[match[2].lower()])
    if size < 1:
        raise UserError(f"'{text}' is no memory at all", "give the agent some, like 8GiB")
    return size


def default_name() -> PNodeId:
    """The machine's name, as far as it is one, and a short suffix, so that several agents of a machine differ."""
    host = re.sub(r"[^A-Za-z0-9_-]+", "-", platform.node().split(".")[0]).strip("-")[:40] or "pnode"
    return PNodeId(f"{host}-{secrets.token_hex(2)}")


def describe_process(name: PNodeId, backend: Backend, memory: int) -> PNodeInfo:
    """What heartbeats say of this process."""
    return PNodeInfo(
        pnode=name,
        incarnation=secrets.token_hex(8),
        host=host_id(),
        backend=backend.name,
        device=backend.device,
        memory_total=memory,
        memory_used=0,
        cores=len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else psutil.cpu_count() or 1,
        pid=os.getpid(),
        version=__version__,
    )


@click.command("dcnr-agent", epilog="\b\nExample:\n  dcnr-agent --name gpu-1 --memory 8GiB --nats nats://10.0.0.1:4222")
@click.version_option(__version__, prog_name="dcnr-agent")
@click.option("--name", help="Name of this PNode (default: the machine's, with a suffix).")
@click.option("--backend", type=click.Choice(get_args(BackendName)), default="auto", show_default=True, help="What it computes on.")
@click.option("--device", type=click.IntRange(0), help="Number of its GPU (default: the first); one agent for each GPU.")
@click.option("--memory", default=DEFAULT_MEMORY, show_default=True, help="What it may hold, like 8GiB, or a share of its device's.")
@click.option("--nats", "nats_url", help="The NATS server (default: $NATS_URL or nats://127.0.0.1:4222).")
def main(name: str | None, backend: str, device: int | None, memory: str, nats_url: str | None) -> None:
    """Host VNodes on one device of this machine until Ctrl-C."""
    log.configure()
    try:
        pnode = PNodeId(check_id(name, "PNode")) if name is not None else default_name()
        parse_memory(memory, 1 << 40)  # before anything is compiled
        loaded = load_backend(backend, device)
        limit = parse_memory(memory, loaded.memory().total)
        uvloop.run(serve(pnode, loaded, limit, from_environment(nats_url=nats_url).nats_url))
    except DcnrError as error:
        click.echo(f"error: {error}", err=True)
        raise click.exceptions.Exit(2 if isinstance(error, UserError | BackendUnavailable) else 1) from error


async def serve(name: PNodeId, backend: Backend, memory: int, url: str) -> None:
    """Run until SIGINT or SIGTERM; a second one, or a job that does not end, ends the process at once. Waits for its server to come."""
    info = describe_process(name, backend, memory)
    shell = Shell(info, backend, MonotonicClock(), info.cores)
    serving = asyncio.Event()

    def ready() -> None:
        serving.set()
        click.echo(f"{name} is ready at {url}: backend {info.backend}, {memory / (1 << 30):.1f} GiB, {info.cores} cores, {info.device}")

    run = asyncio.create_task(shell.run(lambda purpose: connect(url, f"{name}-{purpose}", patient=True), ready))
    on_interrupt(lambda: shell.stop() if serving.is_set() else run.cancel(), GRACE)
    await asyncio.wait([run])
    if not run.cancelled():
        run.result()


if __name__ == "__main__":
    main(prog_name="dcnr-agent")
