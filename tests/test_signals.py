"""A process ends as it promised."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from dcnr.signals import INTERRUPTED

PROGRAM = """
import asyncio
from dcnr.signals import on_interrupt

async def main():
    stop = asyncio.Event()
    on_interrupt(stop.set if {orderly} else lambda: print("asked", flush=True), {grace})
    print("ready", flush=True)
    await stop.wait()
    print("in order", flush=True)

asyncio.run(main())
"""


def start(orderly: bool, grace: float) -> subprocess.Popen[str]:
    """A process that waits to be interrupted."""
    program = PROGRAM.format(orderly=orderly, grace=grace)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_interrupt_lets_it_end_in_order(number: signal.Signals) -> None:
    """Its own code runs to the end, and the exit code is its own."""
    process = start(orderly=True, grace=30)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert (output, process.returncode) == ("in order\n", 0)


def test_the_second_interrupt_ends_it_at_once() -> None:
    """However long it would have had."""
    process = start(orderly=False, grace=30)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert (output, process.returncode) == ("", INTERRUPTED)


def test_one_that_does_not_end_is_ended() -> None:
    """After the grace that it has."""
    process = start(orderly=False, grace=0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == INTERRUPTED
