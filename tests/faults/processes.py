"""Processes of a cluster by name: started, stopped, continued, killed and started again, each with its own log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cli.conftest import environment

TAIL = 25
"""Lines of a log that a failure shows."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a process is started."""

    command: tuple[str, ...]
    env: Mapping[str, str]


class Processes:
    """All of them. Logs of restarts follow each other in one file."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._logs = data_dir / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._recipes: dict[str, Recipe] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], **env: str) -> None:
        """Start one for the first time."""
        self._recipes[name] = Recipe(tuple(command), environment(self._data_dir, **env))
        self.again(name)

    def again(self, name: str) -> None:
        """Start one that has ended."""
        assert not self.runs(name), f"{name} runs already"
        recipe = self._recipes[name]
        with self.log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                recipe.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(recipe.env), start_new_session=True
            )

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal; at once."""
        os.kill(self.pid(name), number)

    def kill(self, name: str) -> None:
        """SIGKILL; returns when it is gone."""
        self._running[name].kill()
        self._running[name].wait()

    def runs(self, name: str) -> bool:
        """Whether it has not ended."""
        return name in self._running and self._running[name].poll() is None

    def wait(self, name: str, timeout: float) -> int:
        """Until it ends by itself; its exit code. Blocks."""
        return self._running[name].wait(timeout)

    def pid(self, name: str) -> int:
        """Of the newest process of that name."""
        return self._running[name].pid

    def process(self, name: str) -> psutil.Process:
        """For measuring it."""
        return psutil.Process(self.pid(name))

    def names(self, kind: str = "") -> list[str]:
        """Those that run and whose name starts so."""
        return [name for name in self._recipes if name.startswith(kind) and self.runs(name)]

    def log(self, name: str) -> Path:
        """Where it writes."""
        return self._logs / f"{name}.log"

    def tails(self) -> str:
        """The last lines of every log."""
        parts = []
        for name in self._recipes:
            lines = self.log(name).read_text(errors="replace").splitlines()[-TAIL:]
            state = "runs" if self.runs(name) else f"ended with {self._running[name].returncode}"
            parts.append(f"--- {name} ({state})\n" + "\n".join(lines))
        return "\n".join(parts)

    def stop_all(self) -> None:
        """In order where they can, by force after a moment."""
        for process in self._running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self._running.values():
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def python(module: str, *arguments: str) -> list[str]:
    """A program of ours."""
    return [sys.executable, "-m", module, *arguments]
