"""The bundled server starts, says why it cannot, and never outlives its owner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dcnr.bus.nats import connect
from dcnr.bus.server import ACCOUNT, MIN_VERSION, NatsServer, configuration, find_binary, read_version
from dcnr.errors import UserError
from tests.bus.contract import until

_OWNER = """
import asyncio, sys
from pathlib import Path
from dcnr.bus.server import NatsServer
server = NatsServer(Path(sys.argv[1]))
asyncio.run(server.start())
print(server.pid, flush=True)
sys.stdin.read()
"""


def spawn(command: list[str]) -> subprocess.Popen[bytes]:
    """A child whose stdin and stdout we hold."""
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def python(script: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A child that runs `script`."""
    return spawn([sys.executable, "-c", script, *arguments])


def runs(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


async def test_it_answers_after_start_and_is_gone_after_stop(tmp_path: Path) -> None:
    """In its own process group, on a free port."""
    server = NatsServer(tmp_path)
    await server.start()
    pid = server.pid
    assert pid is not None
    assert os.getpgid(pid) == pid
    bus = await connect(server.url, "t")
    await bus.close()
    await server.stop()
    await server.stop()
    assert server.pid is None
    assert not runs(pid)


async def test_a_busy_port_is_named(tmp_path: Path) -> None:
    """With what to do about it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} is already in use .*--port"):
            await NatsServer(tmp_path, port=port).start()


async def test_a_store_has_one_owner(tmp_path: Path) -> None:
    """The second is told, the first goes on."""
    server = NatsServer(tmp_path)
    await server.start()
    with pytest.raises(UserError, match="another cluster runs on"):
        await NatsServer(tmp_path).start()
    bus = await connect(server.url, "t")
    await bus.close()
    await server.stop()


async def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file stands where the directory should be."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*--data-dir"):
        await NatsServer(tmp_path / "file" / "nats").start()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
async def test_a_killed_owner_takes_the_server_with_it(tmp_path: Path) -> None:
    """SIGKILL leaves it no time to say good-bye."""
    owner = python(_OWNER, str(tmp_path))
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert runs(pid)
    owner.kill()
    owner.communicate()
    await until(lambda: not runs(pid))


async def test_an_orphan_on_the_store_is_stopped(tmp_path: Path) -> None:
    """Where the system does not end it, the next owner does; and only if the process is that server."""
    orphan = NatsServer(tmp_path)
    await orphan.start()
    await orphan.stop()
    conf = tmp_path / "nats-server.conf"
    process = spawn([str(find_binary(os.environ)), "-c", str(conf)])
    await until(lambda: (tmp_path / "nats-server.pid").exists() and (tmp_path / "nats-server.pid").read_text() == str(process.pid))
    server = NatsServer(tmp_path)
    await server.start()
    process.communicate(timeout=5)
    await server.stop()


async def test_a_pid_file_that_names_another_process_harms_nobody(tmp_path: Path) -> None:
    """Pids are used again."""
    bystander = python("import sys; sys.stdin.read()")
    (tmp_path / "nats-server.pid").write_text(str(bystander.pid))
    server = NatsServer(tmp_path)
    await server.start()
    assert bystander.poll() is None
    bystander.communicate()
    await server.stop()


async def test_a_server_that_does_not_listen_to_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the middle of something, for instance."""
    monkeypatch.setattr("dcnr.bus.server.STOP_TIMEOUT", 0.3)
    server = NatsServer(tmp_path)
    await server.start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await server.stop()
    assert not runs(pid)


def test_the_binary_is_found_in_order(tmp_path: Path) -> None:
    """Named, beside Python, on PATH; a wrong name is an error and not a reason to look elsewhere."""
    program = tmp_path / "nats-server"
    program.write_text("#!/bin/sh\necho 'nats-server: v2.9.10'\n")
    program.chmod(0o755)
    assert find_binary({"NATS_SERVER_BIN": str(program)}) == program
    assert read_version(program) == (2, 9, 10)
    assert read_version(find_binary({})) >= MIN_VERSION
    with pytest.raises(UserError, match=r"NATS_SERVER_BIN=.* is no program"):
        find_binary({"NATS_SERVER_BIN": str(tmp_path / "absent")})


async def test_an_old_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would ignore in silence what we ask of it."""
    program = tmp_path / "nats-server"
    program.write_text("#!/bin/sh\necho 'nats-server: v2.9.10'\n")
    program.chmod(0o755)
    monkeypatch.setenv("NATS_SERVER_BIN", str(program))
    with pytest.raises(UserError, match=r"is version 2\.9\.10, and 2\.11\.0 is the oldest"):
        await NatsServer(tmp_path / "store").start()


def test_a_program_that_is_no_server_is_refused(tmp_path: Path) -> None:
    """By what it says, or by not running at all."""
    program = tmp_path / "true"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    with pytest.raises(UserError, match="is not a nats-server"):
        read_version(program)
    program.write_text("no program")
    with pytest.raises(UserError, match="does not run"):
        read_version(program)


async def test_what_an_earlier_version_stored_is_taken_along(tmp_path: Path) -> None:
    """It kept buckets under the default account; a store that has our account already stays as it is."""
    server = NatsServer(tmp_path)
    await server.start()
    bus = await connect(server.url, "t")
    await (await bus.kv("kept")).put("key", b"value")
    await bus.close()
    await server.stop()
    accounts = tmp_path / "jetstream" / "jetstream"
    (accounts / ACCOUNT).rename(accounts / "$G")
    for _ in range(2):
        server = NatsServer(tmp_path)
        await server.start()
        bus = await connect(server.url, "t")
        entry = await (await bus.kv("kept", make=False)).get("key")
        assert entry is not None
        assert entry.value == b"value"
        await bus.close()
        await server.stop()
        (accounts / "$G").mkdir(exist_ok=True)


def test_the_configuration_quotes_paths() -> None:
    """Spaces and quotes in the data directory."""
    text = configuration(Path('/a "b"/c d'), "127.0.0.1", 0, 65536)
    assert r'store_dir: "/a \"b\"/c d/jetstream"' in text
    assert "port: -1" in text
    assert "sync_interval: always" in text


async def test_a_store_with_spaces_and_quotes_works(tmp_path: Path) -> None:
    """As in someone's home directory."""
    server = NatsServer(tmp_path / 'my "own" data')
    await server.start()
    await server.stop()
