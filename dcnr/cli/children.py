"""Child processes that never outlive this one, and the lock of a data directory.

Rule 1: every child leads a process group of its own, so Ctrl-C in the terminal reaches only this process, which then stops them in order.
Rule 2: each group is told to a guard (cli/guard), which ends it should this process be killed.
Rule 3: the guard holds the lock too, so a directory is free only when the last child is gone.
Rule 4: one that died can be started again under its name. Each death soon after a start makes the pause before the next start longer; one
that ends by itself so often is given up. Whom somebody kills is never given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dcnr.errors import DcnrError, UserError

USER_ERROR = 2
"""Exit code of our programs for what the user can mend."""
SOON = 10.0
"""Seconds of life that count as none."""
PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Seconds before a start: the first after a life, the others after one, two … deaths soon after a start."""
KILLED = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of those that did not end by themselves."""


class DirectoryLock:
    """One cluster at a time on a data directory."""

    def __init__(self, data_dir: Path) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = (data_dir / "cluster.lock").open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            pid = self._file.read().strip() or "unknown"
            self._file.close()
            raise UserError(
                f"a cluster already runs on the data directory {data_dir} (pid {pid})",
                "use that one (leave out --local), stop it, or name another directory with --data-dir",
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def fileno(self) -> int:
        """For handing the lock on."""
        return self._file.fileno()

    def release(self) -> None:
        """Let go; free once the guard has let go too."""
        self._file.close()


class Guard:
    """The other end of cli/guard."""

    def __init__(self, lock: DirectoryLock) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("guard.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(lock.fileno(),),
            start_new_session=True,
            text=True,
        )

    def born(self, pid: int) -> None:
        """End this group if we are killed."""
        self._tell(f"+{pid}\n")

    def reaped(self, pid: int) -> None:
        """This group is gone."""
        self._tell(f"-{pid}\n")

    def close(self) -> None:
        """Let the guard end what is left, which is nothing after an orderly stop, and wait for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a child is started."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Child:
    """One running part of a cluster. `deaths`: how many before it died soon after their start, one after the other."""

    recipe: Recipe
    process: asyncio.subprocess.Process
    log: Path
    born: float
    deaths: int = 0

    @property
    def name(self) -> str:
        """What it is called."""
        return self.recipe.name

    def epitaph(self) -> str:
        """How it ended, in one line."""
        code = self.process.returncode
        if code is not None and code < 0:
            return f"{self.name} was ended by {signal.Signals(-code).name} (log: {self.log})"
        lines = self.log.read_text(errors="replace").split("\n") if self.log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
        return f"{self.name} ended with exit code {code}: {last.removeprefix('error: ')} (log: {self.log})"

    def failure(self) -> DcnrError:
        """The same as an error, of the kind that its exit code stands for."""
        return (UserError if self.process.returncode == USER_ERROR else DcnrError)(self.epitaph())


class Children:
    """Starts, watches and stops child processes. Logs go to `log_dir`, one file for each name."""

    def __init__(self, guard: Guard, log_dir: Path) -> None:
        self._guard = guard
        self._log_dir = log_dir
        self._running: dict[str, Child] = {}

    async def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> Child:
        """Start one; `env` is added to our own environment."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._log(name).unlink(missing_ok=True)
        return await self._start(Recipe(name, tuple(command), env), 0)

    async def again(self, dead: Child) -> Child:
        """Start one that died once more, after the pause that is due; its log goes on."""
        deaths = soon_again(dead.born, dead.deaths)
        await asyncio.sleep(PAUSES[min(deaths, len(PAUSES) - 1)])
        return await self._start(dead.recipe, deaths)

    async def _start(self, recipe: Recipe, deaths: int) -> Child:
        path = self._log(recipe.name)
        with path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *recipe.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **recipe.env}, start_new_session=True
            )
        self._guard.born(process.pid)
        child = self._running[recipe.name] = Child(recipe, process, path, time.monotonic(), deaths)
        return child

    async def death(self, name: str) -> Child:
        """Wait until the one of that name ends."""
        child = self._running[name]
        await child.process.wait()
        self._forget(child)
        return child

    async def next_death(self) -> Child:
        """Wait until any of them ends."""
        waits = [asyncio.ensure_future(self.death(name)) for name in self._running]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return done.pop().result()

    async def stop(self, names: Sequence[str], patience: float) -> None:
        """Ask some to end, wait at most `patience` seconds, then end them by force."""
        children = [self._running.pop(name) for name in names if name in self._running]
        for child in children:
            _signal(child, signal.SIGTERM)
        waits = [asyncio.ensure_future(child.process.wait()) for child in children]
        if waits:
            await asyncio.wait(waits, timeout=patience)
        for child in children:
            _signal(child, signal.SIGKILL)
        await asyncio.gather(*waits)
        for child in children:
            self._guard.reaped(child.process.pid)

    @property
    def names(self) -> tuple[str, ...]:
        """Those that run, in the order in which they were started."""
        return tuple(self._running)

    def pid(self, name: str) -> int:
        """Process id of one that runs."""
        return self._running[name].process.pid

    def _forget(self, child: Child) -> None:
        self._guard.reaped(child.process.pid)
        self._running.pop(child.name, None)

    def _log(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"


def soon_again(born: float, deaths: int) -> int:
    """How many in a row have died soon after their start, up to one that was `born` then, after `deaths` others."""
    return deaths + 1 if time.monotonic() - born < SOON else 0


def is_hopeless(dead: Child) -> bool:
    """Whether one more start makes no sense: it ended by itself, time after time."""
    return dead.process.returncode not in KILLED and soon_again(dead.born, dead.deaths) >= len(PAUSES)


def _signal(child: Child, number: signal.Signals) -> None:
    if child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, number)
