"""Commands ask the orchestrator, say when nobody is there, and obey Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from click.testing import CliRunner

from dcnr.cli.client import beside_loop
from dcnr.cli.main import main
from dcnr.cli.output import OnProgress
from dcnr.errors import UserError

IMPATIENT = """
import asyncio
from dcnr.cli.client import run
async def work():
    print("here", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("tidy", flush=True)
        {then}
run(work())
"""


def interrupt(then: str, times: int) -> tuple[int, str, float]:
    """(exit code, stdout, seconds) of a command that is interrupted."""
    process = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT.format(then=then)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    began = time.monotonic()
    for index in range(times):
        if index:
            assert process.stdout.readline() == "tidy\n"
        process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    return process.returncode, out, time.monotonic() - began


def test_ctrl_c_lets_a_command_tidy_up() -> None:
    """Its `finally` runs, and the exit code says what happened."""
    code, out, seconds = interrupt("pass", times=1)
    assert (code, out) == (130, "tidy\n")
    assert seconds < 2.0


def test_a_command_that_does_not_end_is_ended() -> None:
    """Within 3 s, whatever it waits for."""
    code, out, seconds = interrupt("await asyncio.Event().wait()", times=1)
    assert (code, out) == (130, "tidy\n")
    assert seconds < 3.5


def test_a_second_ctrl_c_ends_at_once() -> None:
    """Nothing more is waited for."""
    code, _, seconds = interrupt("await asyncio.Event().wait()", times=2)
    assert code == 130
    assert seconds < 2.0


@pytest.mark.parametrize("arguments", [["pnode", "list"], ["session", "list"], ["network", "show", "tiny"], ["metrics", "tail"]])
def test_no_server_is_one_line_and_code_2(arguments: list[str]) -> None:
    """With the address, and what to start."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"nats://127.0.0.1:{taken.getsockname()[1]}"
    result = CliRunner(env={"NATS_URL": url, "HOME": os.environ["HOME"]}).invoke(main, arguments)
    assert result.exit_code == 2, result.output
    assert url.removeprefix("nats://") in result.output
    assert result.output.count("\n") == 1


async def test_work_beside_the_loop_gives_its_result_its_error_and_its_progress() -> None:
    """As if it had been called here."""
    seen: list[tuple[int, int]] = []

    def work(on_progress: OnProgress) -> str:
        on_progress(1, 2)
        return "done"

    def broken(on_progress: OnProgress) -> None:
        raise UserError("broken")

    assert await beside_loop(work, lambda done, total: seen.append((done, total))) == "done"
    assert seen == [(1, 2)]
    with pytest.raises(UserError, match="broken"):
        await beside_loop(broken)


async def test_cancelled_work_beside_the_loop_stops_at_its_next_progress() -> None:
    """And puts its things in order before the loop goes on."""
    began, tidy = threading.Event(), threading.Event()

    def work(on_progress: OnProgress) -> None:
        try:
            while True:
                on_progress(0, 1)
                began.set()
        finally:
            tidy.set()

    working = asyncio.ensure_future(beside_loop(work))
    while not began.is_set():
        await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert tidy.is_set()
