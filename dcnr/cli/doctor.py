"""`dcnr doctor`: what works here, and what to do about what does not.

Rule 1: a check is a function that returns what it found, or raises `DcnrError` whose remedy is the advice.
Rule 2: what nobody needs (a GPU, a running cluster) is optional: reported, and no reason for a bad exit code.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import click
from rich.console import Console

from dcnr import __version__
from dcnr.backends.cupy import probe
from dcnr.backends.load import load_backend
from dcnr.bus.nats import connect
from dcnr.bus.server import find_binary, read_version
from dcnr.cli.client import run
from dcnr.cli.output import Command, data_dir_option, example, json_option, show_json
from dcnr.config import from_environment
from dcnr.errors import BackendUnavailable, BusUnavailable, DcnrError, UserError

LIBRARIES = ("numpy", "numba", "nats-py", "msgpack", "tokenizers")
MIN_SHARED_MEMORY = 64 << 20
"""Bytes that hops between processes of one host want."""
ASK_TIMEOUT = 3.0

Status = Literal["ok", "optional", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    check: str
    status: Status
    found: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Check:
    """One question about this machine. `needed`: nothing trains without it."""

    name: str
    look: Callable[[], str]
    needed: bool = True

    def finding(self) -> Finding:
        """Look."""
        try:
            return Finding(self.name, "ok", self.look(), "")
        except DcnrError as error:
            return Finding(self.name, "problem" if self.needed else "optional", error.message, error.remedy or "")


@click.command(cls=Command, epilog=example("dcnr doctor", "dcnr doctor --json"))
@data_dir_option
@json_option
def doctor(data_dir: Path, as_json: bool) -> None:
    """Say what works here: versions, NATS, JetStream, backends, storage. Exit code 1 if something needed does not."""
    problems = 0
    for check in checks(data_dir):
        with Console(stderr=True).status(check.name):  # the first time on a machine, loading a backend compiles kernels
            finding = check.finding()
        problems += finding.status == "problem"
        if as_json:
            show_json(asdict(finding))
        else:
            click.echo(_line(finding))
    if problems:
        raise click.exceptions.Exit(1)


def checks(data_dir: Path) -> tuple[Check, ...]:
    """Every question, in the order in which they are answered."""
    return (
        Check("dcnr", lambda: f"{__version__}, Python {platform.python_version()} on {platform.system()} {platform.machine()}"),
        Check("libraries", look_at_libraries),
        Check("cores", lambda: f"{os.cpu_count()}"),
        Check("nats-server", look_at_binary),
        Check("cluster", look_at_cluster, needed=False),
        Check("backend numpy", partial(look_at_backend, "numpy")),
        Check("backend cpu", partial(look_at_backend, "cpu")),
        *gpu_checks(),
        Check("backend cupy", partial(look_at_backend, "cupy"), needed=False),
        Check("backend mlx", partial(look_at_backend, "mlx"), needed=False),
        Check("shared memory", look_at_shared_memory, needed=False),
        Check("storage", partial(look_at_storage, data_dir)),
    )


def gpu_checks() -> Iterator[Check]:
    """What the cupy backend stands on, and a line for each GPU; each is asked for only if there is what it needs to be asked with."""
    yield Check("gpu package", probe.look_at_package, needed=False)
    with suppress(BackendUnavailable):
        probe.cupy()
        yield Check("gpu driver", probe.look_at_driver, needed=False)
        count = probe.device_count()
        yield Check("gpu compiler", probe.look_at_compiler, needed=False)
        yield Check("gpu products", probe.look_at_products, needed=False)
        for index in range(count):
            yield Check(f"gpu {index}", partial(probe.look_at_device, index), needed=False)


def look_at_libraries() -> str:
    """Versions of what we stand on."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)


def look_at_binary() -> str:
    """The bundled server."""
    binary = find_binary(os.environ)
    return f"{'.'.join(map(str, read_version(binary)))} at {binary}"


def look_at_cluster() -> str:
    """Whether a server answers, with JetStream."""
    return run(_ask_server(from_environment().nats_url))


async def _ask_server(url: str) -> str:
    try:
        async with asyncio.timeout(ASK_TIMEOUT):
            bus = await connect(url, "dcnr-doctor")
            try:
                await bus.kv("dcnr_networks")
            finally:
                await bus.close()
    except TimeoutError:
        raise BusUnavailable(f"{url} does not answer within {ASK_TIMEOUT:.0f} s", "is JetStream on there? start it with -js") from None
    return f"{url} answers, JetStream works"


def look_at_backend(name: Literal["numpy", "cpu", "cupy", "mlx"]) -> str:
    """Load it."""
    backend = load_backend(name)
    return f"loads, {backend.device} with {backend.memory().total >> 20} MiB of memory"


def look_at_shared_memory() -> str:
    """Room for hops between processes; other systems than Linux have no such folder to look at."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return f"managed by {sys.platform}"
    free = shutil.disk_usage(folder).free
    if free < MIN_SHARED_MEMORY:
        raise UserError(f"only {free >> 20} MiB free in {folder}", "make room (a container: --shm-size=1g); hops go over NATS until then")
    return f"{free >> 20} MiB free in {folder}"


def look_at_storage(data_dir: Path) -> str:
    """Whether the data directory can be written."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=data_dir) as file:
            file.write(b"dcnr")
    except OSError as error:
        raise UserError(f"cannot write to {data_dir}: {error.strerror}", "name another directory with --data-dir") from error
    return f"{data_dir} is writable, {shutil.disk_usage(data_dir).free >> 30} GiB free"


def _line(finding: Finding) -> str:
    mark = {"ok": "ok  ", "optional": "-   ", "problem": "FAIL"}[finding.status]
    remedy = f"\n{'':22}{finding.remedy}" if finding.remedy else ""
    return f"{mark} {finding.check:<16} {finding.found}{remedy}"
