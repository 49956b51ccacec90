"""The orchestrator as a program."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from dcnr.bus.api import call
from dcnr.bus.nats import connect
from dcnr.errors import BusUnavailable
from dcnr.orchestrator.main import orchestrator
from tests.orchestrator.fakes import NETWORK
from tests.orchestrator.running import PATIENCE


@asynccontextmanager
async def program(url: str, data_dir: Path, name: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process, waited for at the end."""
    options = ("--data-dir", str(data_dir), "--nats", url, "--name", name)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dcnr.cli.main", "orchestrator", *options, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def until_led_by(url: str, name: str) -> None:
    """Wait for an answer of the orchestrator of that name."""
    bus = await connect(url, "test")
    try:
        async with asyncio.timeout(PATIENCE):
            while not await _leads(bus, name):
                await asyncio.sleep(0.05)
    finally:
        await bus.close()


async def _leads(bus: object, name: str) -> bool:
    try:
        leader: str = (await call(bus, "cluster.info"))["orchestrator"]  # type: ignore[arg-type]
    except BusUnavailable:
        return False
    return leader.startswith(f"{name}-")


@pytest.mark.nats
async def test_ctrl_c_frees_the_lease_and_the_next_process_knows_everything(nats_url: str, tmp_path: Path) -> None:
    """Ends with code 0 within three seconds; its successor leads at once and lists the networks."""
    async with program(nats_url, tmp_path, "first") as first:
        await until_led_by(nats_url, "first")
        bus = await connect(nats_url, "test")
        await call(bus, "network.create", file=NETWORK, replace=True)
        first.send_signal(signal.SIGINT)
        async with asyncio.timeout(3):
            assert await first.wait() == 0
        async with program(nats_url, tmp_path, "second") as second:
            await until_led_by(nats_url, "second")
            assert "small" in [row["name"] for row in (await call(bus, "network.list"))["networks"]]
            await call(bus, "network.delete", name="small")
            second.send_signal(signal.SIGTERM)
            assert await second.wait() == 0
        await bus.close()


def test_without_a_server_it_ends_with_one_line_and_code_2(tmp_path: Path) -> None:
    """The address is in it."""
    done = CliRunner().invoke(orchestrator, ["--data-dir", str(tmp_path), "--nats", "nats://127.0.0.1:1"])
    assert done.exit_code == 2
    assert done.output.startswith("error: ")
    assert "127.0.0.1:1" in done.output


def test_a_name_that_is_no_name_is_refused(tmp_path: Path) -> None:
    """Before anything is contacted."""
    done = CliRunner().invoke(orchestrator, ["--data-dir", str(tmp_path), "--name", "a.b"])
    assert (done.exit_code, "not a valid orchestrator name" in done.output) == (2, True)


def test_help_shows_an_example() -> None:
    """As every command does."""
    assert "Example:" in CliRunner().invoke(orchestrator, ["--help"]).output
