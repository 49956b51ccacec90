"""One side of a comparison as a process that waits for its turn.

A side prepares itself, prints one JSON line that says what it is, and then answers every line `steps` on its stdin with one JSON line of
results. So all sides stay warm, and the measuring process lets them run one after another, again and again.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

Fields = Mapping[str, Any]
LINE = 1 << 20
"""Longest answer, in bytes."""
WAITED_FOR = 20
"""At most so many steps are also timed one by one."""


def take_turns(ready: Fields, run: Callable[[int], Fields]) -> None:
    """The side's own part: say `ready`, then `run(steps)` for every line, until stdin ends."""
    _say(ready)
    for line in sys.stdin:
        _say(run(int(line)))


def _say(fields: Fields) -> None:
    sys.stdout.write(json.dumps(dict(fields)) + "\n")
    sys.stdout.flush()


def measure(run: Callable[[], object], wait: Callable[[], object], steps: int) -> tuple[float, float]:
    """(median of steps that are waited for, mean of `steps` back to back), in ms; half as many run first to warm the device."""
    for _ in range(steps // 2 + 1):
        run()
    wait()
    times = []
    for _ in range(min(steps, WAITED_FOR)):
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(steps):
        run()
    wait()
    return statistics.median(times) * 1e3, (time.perf_counter() - start) / steps * 1e3


class Side:
    """The measuring process's view of one."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self._process = process
        self.ready: Fields = {}

    async def turn(self, steps: int) -> Fields:
        """Let it run; its results."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n".encode())
        await self._process.stdin.drain()
        return await self.hear()

    async def hear(self) -> Fields:
        """Its next line. Raises `RuntimeError` if it ended instead; what it had to say stands on stderr."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with exit code {await self._process.wait()}")
        fields: Fields = json.loads(line)
        return fields


@asynccontextmanager
async def side(name: str, command: Sequence[str], environment: Mapping[str, str]) -> AsyncIterator[Side]:
    """Start `command` (a script beside this file, and its options), and wait until it is ready."""
    script = Path(__file__).with_name(command[0])
    everything = {**os.environ, **environment}
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), *command[1:], stdin=PIPE, stdout=PIPE, limit=LINE, env=everything
    )
    try:
        one = Side(name, process)
        one.ready = await one.hear()
        yield one
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
