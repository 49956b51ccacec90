"""`dcnr up`: ready when it says so, gone within 3 s of Ctrl-C, and gone even after kill -9."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.conftest import command, environment, start_up, strays

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]


def wait_until_gone(data_dir: Path, seconds: float) -> None:
    """Until no process works on `data_dir`."""
    until = time.monotonic() + seconds
    while left := strays(data_dir):
        assert time.monotonic() < until, left
        time.sleep(0.05)


def test_ctrl_c_stops_everything_within_three_seconds(tmp_path: Path) -> None:
    """Exit code 130, no process left, and the ready line has what others need."""
    process, ready = start_up(tmp_path, "--agents", "2")
    assert ready["event"] == "ready"
    assert ready["agents"] == ["agent-1", "agent-2"]
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    assert time.monotonic() - began < 3.5
    assert strays(tmp_path) == []


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    """What is left is ended by the guard."""
    process, _ = start_up(tmp_path, "--agents", "1")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    wait_until_gone(tmp_path, 10)


def test_kill_9_leaves_nothing(tmp_path: Path) -> None:
    """The guard ends server, orchestrator and agents."""
    process, _ = start_up(tmp_path, "--agents", "1")
    process.kill()
    process.communicate(timeout=20)
    wait_until_gone(tmp_path, 10)


def test_a_busy_port_is_one_line_and_code_2(tmp_path: Path) -> None:
    """It names the port and the way out, and leaves nothing running."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            command("up", "--port", port), env=environment(tmp_path), capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 2
    assert f"port {port} is already in use" in done.stderr
    assert done.stderr.count("\n") == 1
    assert strays(tmp_path) == []


def test_a_server_that_is_not_there_is_one_line_with_a_way_out(tmp_path: Path) -> None:
    """`NATS_URL` names it; nothing was started for nothing."""
    env = environment(tmp_path, NATS_URL="nats://127.0.0.1:1")
    done = subprocess.run(command("up"), env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "error: no NATS server answers at nats://127.0.0.1:1 (start that server; or unset NATS_URL, and one is started here)\n"
    )
    assert strays(tmp_path) == []


def test_who_names_a_port_gets_a_server_there(tmp_path: Path) -> None:
    """Also in a terminal in which `NATS_URL` still names another."""
    process, ready = start_up(tmp_path, "--agents", "1", NATS_URL="nats://127.0.0.1:1")
    assert ready["url"] != "nats://127.0.0.1:1"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
