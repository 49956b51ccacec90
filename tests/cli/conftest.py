"""A real cluster of two agents, started once by `dcnr up`, and a way to run commands against it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog
from click.testing import CliRunner, Result

from dcnr.cli.main import main

NETWORKS = Path(__file__).parents[2] / "networks"
TINY = str(NETWORKS / "tiny.yml")


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Commands that run in this process set up its log; the tests after them have their own ideas of it."""
    yield
    structlog.reset_defaults()


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where it is."""

    url: str
    data_dir: Path

    def dcnr(self, *arguments: str, code: int = 0) -> Result:
        """Run a command in this process; `code` is the exit code that it must end with."""
        result = CliRunner(env={"NATS_URL": self.url, "DCNR_DATA_DIR": str(self.data_dir)}).invoke(main, list(arguments))
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return result

    def json(self, *arguments: str) -> Any:
        """The object that a command prints."""
        return json.loads(self.dcnr(*arguments, "--json").stdout)


def environment(data_dir: Path, **more: str) -> dict[str, str]:
    """Ours, without a server of the person who runs the tests."""
    return {name: value for name, value in os.environ.items() if name != "NATS_URL"} | {"DCNR_DATA_DIR": str(data_dir)} | more


def command(*arguments: str) -> list[str]:
    """The program as users start it."""
    return [sys.executable, "-m", "dcnr.cli.main", *arguments]


def strays(data_dir: Path) -> list[str]:
    """Processes that work on a data directory."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            try:
                ours = process.environ().get("DCNR_DATA_DIR") == str(data_dir) or str(data_dir) in " ".join(process.info["cmdline"] or [])
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if ours:
                found.append(" ".join(process.info["cmdline"]))
    return found


def start_up(data_dir: Path, *arguments: str, **more: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """`dcnr up`, in our environment with `more`, and what it says when it is ready."""
    process = subprocess.Popen(
        command("up", "--backend", "numpy", "--port", "0", "--json", *arguments),
        env=environment(data_dir, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        _, err = process.communicate()
        raise AssertionError(err)
    return process, json.loads(line)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Shared by the tests of this folder: each uses names of its own."""
    data_dir = tmp_path_factory.mktemp("cluster")
    process, ready = start_up(data_dir, "--agents", "2")
    yield Cluster(ready["url"], data_dir)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert strays(data_dir) == []


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """Enough text for the tiny network."""
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {i}: the quick brown fox jumps over {i * i} lazy dogs\n" for i in range(2000)))
    return path
