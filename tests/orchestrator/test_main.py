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
from dcnr.bus.base import Bus
from dcnr.bus.nats import connect
from dcnr.bus.server import NatsServer
from dcnr.errors import BusUnavailable
from dcnr.orchestrator.main import orchestrator
from tests.orchestrator.fakes import NETWORK
from tests.orchestrator.running import PATIENCE


@asynccontextmanager
async def program(url: str, data_dir: Path, name: str, *more: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process, waited for at the end."""
    options = ("--data-dir", str(data_dir), "--nats", url, "--name", name, *more)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dcnr.cli.main", "orchestrator", *options, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
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


async def until_printed(process: asyncio.subprocess.Process, what: bytes) -> None:
    """Wait for a line of its log."""
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE):
        while what not in await process.stderr.readline():
            assert process.returncode is None


async def _leads(bus: Bus, name: str) -> bool:
    """Of several that hear the request the first answer counts; one that is stopped gives none."""
    try:
        async with asyncio.timeout(0.5):
            leader: str = (await call(bus, "cluster.info"))["orchestrator"]
    except (BusUnavailable, TimeoutError):
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


@pytest.mark.nats
@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_standby_leads_within_eight_seconds(tmp_path: Path) -> None:
    """When the leader is stopped, and much sooner when it sees that the process is gone. A stopped leader that goes on stands by."""
    server = NatsServer(tmp_path / "nats")
    await server.start()
    async with program(server.url, tmp_path, "first") as first:
        await until_led_by(server.url, "first")
        async with program(server.url, tmp_path, "second") as second:
            await until_printed(second, b"waits for the lease")
            first.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(8):
                await until_led_by(server.url, "second")
            first.send_signal(signal.SIGCONT)
            await until_printed(first, b"stands by")
            second.kill()
            async with asyncio.timeout(4):
                await until_led_by(server.url, "first")
    await server.stop()


@pytest.mark.nats
async def test_an_orchestrator_waits_for_its_server(tmp_path: Path) -> None:
    """And says so: which of the two is started first does not matter."""
    server = NatsServer(tmp_path / "nats")
    await server.start()
    port = int(server.url.rsplit(":", 1)[1])
    await server.stop()
    async with program(server.url, tmp_path, "early") as process:
        await until_printed(process, b"no NATS server")
        server = NatsServer(tmp_path / "nats", port=port)
        await server.start()
        await until_led_by(server.url, "early")
    await server.stop()


@pytest.mark.nats
@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_server_that_comes_back_without_its_store_ends_the_orchestrator_until_a_person_accepts_it(tmp_path: Path) -> None:
    """Code 2, with what happened and what to do; so does every start after that, but one with the option."""
    server = NatsServer(tmp_path / "nats")
    await server.start()
    port = int(server.url.rsplit(":", 1)[1])
    async with program(server.url, tmp_path, "o") as process:
        await until_led_by(server.url, "o")
        server.kill()
        await server.stop()
        server = NatsServer(tmp_path / "empty", port=port)
        await server.start()
        said = (await process.communicate())[1]
        assert process.returncode == 2, said
        assert b"error: the NATS server has no records of this cluster" in said
    async with program(server.url, tmp_path, "o") as process:
        assert b"--accept-empty-store" in (await process.communicate())[1]
        assert process.returncode == 2
    async with program(server.url, tmp_path, "o", "--accept-empty-store"):
        await until_led_by(server.url, "o")
    await server.stop()


def test_an_address_or_a_storage_that_is_none_ends_it_with_one_line_and_code_2(tmp_path: Path) -> None:
    """Waiting would not help."""
    for wrong in (("--nats", "nats://host:port"), ("--storage", "ftp://x")):
        done = CliRunner().invoke(orchestrator, ["--data-dir", str(tmp_path), "--nats", "nats://127.0.0.1:1", *wrong])
        assert done.exit_code == 2
        assert done.output.startswith("error: ")
        assert wrong[1].partition(":")[0] in done.output


def test_a_name_that_is_no_name_is_refused(tmp_path: Path) -> None:
    """Before anything is contacted."""
    done = CliRunner().invoke(orchestrator, ["--data-dir", str(tmp_path), "--name", "a.b"])
    assert (done.exit_code, "not a valid orchestrator name" in done.output) == (2, True)


def test_help_shows_an_example() -> None:
    """As every command does."""
    assert "Example:" in CliRunner().invoke(orchestrator, ["--help"]).output
