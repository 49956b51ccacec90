"""The command: its options, and the life of a real process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner

from dcnr.agents.main import default_name, main, parse_memory
from dcnr.bus import codec, subjects
from dcnr.bus.messages import Heartbeat
from dcnr.bus.nats import connect
from dcnr.bus.server import NatsServer
from dcnr.errors import UserError
from dcnr.ids import PNodeId, is_id

PATIENCE = 30.0


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("512MiB", 512 << 20),
        ("2gb", 2 * 10**9),
        ("1.5 g", 3 << 29),
        ("1000", 1000),
        ("64 KiB", 65536),
        ("1TB", 10**12),
        ("40%", 4 << 20),
        ("2.5 %", 1 << 18),
    ],
)
def test_memory_is_read_as_people_write_it(text: str, size: int) -> None:
    """Powers of 1024 and of 1000, with or without B, in any case; or a share of what the device has."""
    assert parse_memory(text, 10 << 20) == size


@pytest.mark.parametrize("text", ["", "lots", "8 GiBs", "-1GiB", "1e9", "0", "0.1B", "GiB", "0%", "%"])
def test_other_words_for_memory_are_errors(text: str) -> None:
    """One sentence that repeats what was given."""
    with pytest.raises(UserError, match="memory"):
        parse_memory(text, 10 << 20)


def test_default_names_are_ids_and_differ() -> None:
    """Two agents of one machine are two."""
    assert is_id(default_name())
    assert default_name() != default_name()


@pytest.fixture
def log_settings() -> Iterator[None]:
    """The command sets up logging for its process; that is this one, here."""
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("log_settings")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--name", "a b"], "'a b' is not a valid PNode name"),
        (["--memory", "lots"], "'lots' is not an amount of memory"),
        (["--backend", "numpy", "--nats", "nats://127.0.0.1:port"], "nats://127.0.0.1:port"),
        (["--backend", "abacus"], "abacus"),
        (["--backend", "numpy", "--device", "0"], "no device 0 to choose"),
        (["--device", "-1"], "--device"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    """Before anything is started."""
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_help_shows_an_example() -> None:
    """As every command does."""
    assert "Example" in CliRunner().invoke(main, ["--help"]).output


@contextmanager
def starting(url: str, name: str, stderr: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """A real agent; it is killed if the test leaves it running."""
    command = [sys.executable, "-m", "dcnr.agents.main", "--name", name, "--backend", "numpy", "--memory", "1GiB", "--nats", url]
    env = {**os.environ, "PYTHONWARNINGS": "error"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def is_ready(process: subprocess.Popen[str], url: str, name: str) -> bool:
    """Wait until it says so."""
    assert process.stdout is not None
    return process.stdout.readline().startswith(f"{name} is ready at {url}: backend numpy, 1.0 GiB")


@contextmanager
def agent(url: str, name: str, stderr: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """A real agent, ready."""
    with starting(url, name, stderr) as process:
        assert is_ready(process, url, name)
        yield process


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.nats
def test_an_agent_that_is_there_before_its_server_waits_and_says_so(tmp_path: Path) -> None:
    """It is ready once the server is."""
    port = free_port()
    server = NatsServer(tmp_path, port)
    with starting(f"nats://127.0.0.1:{port}", "early", stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert f"no NATS server at nats://127.0.0.1:{port} yet" in process.stderr.readline()
        asyncio.run(server.start())
        try:
            assert is_ready(process, server.url, "early")
        finally:
            asyncio.run(server.stop())


def test_an_agent_that_waits_for_its_server_ends_when_it_is_asked_to() -> None:
    """At once, and in order."""
    with starting(f"nats://127.0.0.1:{free_port()}", "early", stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert "no NATS server" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


@pytest.mark.nats
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_beats_and_says_good_bye_when_it_is_asked_to_end(nats_url: str, number: signal.Signals) -> None:
    """It is gone within two seconds, with exit code 0."""
    name = f"main-{number.name}"

    async def beats() -> list[Heartbeat]:
        heard: asyncio.Queue[bytes] = asyncio.Queue()
        bus = await connect(nats_url, "test")
        await bus.subscribe(subjects.heartbeat(PNodeId(name)), heard.put_nowait)
        found: list[Heartbeat] = []
        try:
            async with asyncio.timeout(PATIENCE):
                while not found or not found[-1].stopping:
                    message = codec.decode(await heard.get())
                    assert isinstance(message, Heartbeat)
                    found.append(message)
                    if len(found) == 1:
                        process.send_signal(number)
        finally:
            await bus.close()
        return found

    with agent(nats_url, name) as process:
        found = asyncio.run(beats())
        began = time.monotonic()
        assert process.wait(PATIENCE) == 0
        assert time.monotonic() - began < 2
        assert {beat.info.pid for beat in found} == {process.pid}
        assert (found[0].info.backend, found[0].info.memory_total, found[0].stopping) == ("numpy", 1 << 30, False)


@pytest.mark.nats
def test_a_name_that_is_taken_is_one_line_and_exit_code_2(nats_url: str) -> None:
    """The first one stays; once it was killed, its name is free at once."""
    with agent(nats_url, "twin") as first:
        with agent(nats_url, "twin", stderr=subprocess.PIPE) as second:
            _, err = second.communicate(timeout=PATIENCE)
            assert second.returncode == 2
        told = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(told) == 1
        assert "another agent named 'twin' is alive at host" in told[0]
        assert f"process {first.pid} (choose another --name)" in told[0]
        assert "Traceback" not in err
        assert first.poll() is None
    with agent(nats_url, "twin") as third:
        third.send_signal(signal.SIGTERM)
        assert third.wait(PATIENCE) == 0
