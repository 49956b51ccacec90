"""A local cluster becomes ready, reports deaths, and stops whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from dcnr.bus.api import call
from dcnr.bus.base import Bus
from dcnr.cli.cluster import LocalCluster, places
from dcnr.client.connect import connection
from dcnr.errors import BusUnavailable, DcnrError, UserError, WorldError
from tests.cli.conftest import strays

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def _own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NATS_URL", raising=False)


def pid_of(data_dir: Path, part: str) -> int:
    """The process of one part."""
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if part in line and str(data_dir) in process.environ().get("DCNR_DATA_DIR", ""):
            return int(process.pid)
    raise AssertionError(f"{part} does not run")


def runs_anew(data_dir: Path, part: str, old: int) -> bool:
    """Whether a process of that part runs which is not the `old` one."""
    try:
        return pid_of(data_dir, part) != old
    except (AssertionError, psutil.NoSuchProcess):
        return False


def server_pid(data_dir: Path) -> int:
    """Of the nats-server that wrote its file last; 0 while one is writing it."""
    return int((data_dir / "nats" / "nats-server.pid").read_text() or 0)


def answers(data_dir: Path) -> bool:
    """Whether that server has said where it listens."""
    return (data_dir / "nats" / f"nats-server_{server_pid(data_dir)}.ports").exists()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it."""
    while not condition():
        await asyncio.sleep(0.05)


async def alive(bus: Bus) -> bool:
    """Whether the orchestrator lists agent-1 as alive."""
    try:
        rows = (await call(bus, "pnode.list"))["pnodes"]
    except (BusUnavailable, WorldError):
        return False
    return [row["state"] for row in rows] == ["alive"]


async def test_it_runs_work_and_leaves_nothing(tmp_path: Path) -> None:
    """Work gets its result; afterwards no process is left and the directory is free."""

    async def work() -> str:
        return "result"

    async with LocalCluster(tmp_path, 1, "numpy") as cluster:
        assert await cluster.run_beside(work(), pytest.fail) == "result"
        with pytest.raises(UserError, match="already runs"):
            async with LocalCluster(tmp_path, 1, "numpy"):
                pass
    assert strays(tmp_path) == []


async def test_whoever_dies_lives_again_and_that_is_a_line(tmp_path: Path) -> None:
    """Agent, orchestrator and server, each in its place and under its name."""
    notes: list[str] = []
    async with LocalCluster(tmp_path, 1, "numpy") as cluster:

        async def work() -> None:
            for part in ("agent-1", "orchestrator"):
                old = pid_of(tmp_path, part)
                psutil.Process(old).kill()
                await until(partial(runs_anew, tmp_path, part, old))
                await until(lambda: (tmp_path / "logs" / "agent-1.log").read_text().count("agent-1 is ready") == 2)
            old = server_pid(tmp_path)
            psutil.Process(old).kill()
            await until(lambda: server_pid(tmp_path) != old and answers(tmp_path))
            async with connection(cluster.url) as bus:
                while not await alive(bus):
                    await asyncio.sleep(0.1)

        await cluster.run_beside(asyncio.wait_for(work(), 60), notes.append)
    assert [line.split(" (")[0] for line in notes] == [
        "agent-1 was ended by SIGKILL",
        "orchestrator was ended by SIGKILL",
        "nats-server ended",
    ]
    assert all(line.endswith("; it is started again") for line in notes)
    assert strays(tmp_path) == []


async def test_a_server_that_somebody_kills_is_never_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often and however soon, as `dcnr chaos` does."""
    pauses = (0.0, 0.0)
    monkeypatch.setattr("dcnr.cli.cluster.PAUSES", pauses)
    notes: list[str] = []
    async with LocalCluster(tmp_path, 1, "numpy") as cluster:

        async def work() -> None:
            for _ in range(len(pauses) + 2):
                old = server_pid(tmp_path)
                psutil.Process(old).kill()
                await until(lambda old=old: server_pid(tmp_path) != old and answers(tmp_path))  # type: ignore[misc]

        await cluster.run_beside(asyncio.wait_for(work(), 60), notes.append)
    assert len(notes) == len(pauses) + 2
    assert strays(tmp_path) == []


async def test_one_that_cannot_live_is_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends by itself each time it is started again."""
    monkeypatch.setattr("dcnr.cli.children.PAUSES", (0.0, 0.0, 0.0))
    notes: list[str] = []
    async with LocalCluster(tmp_path, 2, "numpy") as cluster:
        monkeypatch.setenv("PYTHONHOME", str(tmp_path))  # so that no Python starts any more
        psutil.Process(pid_of(tmp_path, "agent-2")).kill()
        with pytest.raises(DcnrError, match="agent-2 ended with exit code 1"):
            await cluster.run_beside(asyncio.Event().wait(), notes.append)
    assert len(notes) == 2
    assert strays(tmp_path) == []


async def test_a_part_that_cannot_start_is_the_error(tmp_path: Path) -> None:
    """Its last words are shown, and the rest is stopped."""
    with pytest.raises(DcnrError, match="agent-1 ended with exit code"):
        async with LocalCluster(tmp_path, 1, "mlx"):
            pass
    assert strays(tmp_path) == []


def test_agents_take_the_devices_in_turn_and_share_their_memory() -> None:
    """Without a device they all share the machine's, or the first GPU's."""
    assert places(2, ()) == [("--memory", "40.000%")] * 2
    first, second = (("--device", "5", "--memory", "40.000%"), ("--device", "7", "--memory", "80.000%"))
    assert places(3, (5, 7)) == [first, second, first]


async def test_agents_are_told_their_device(tmp_path: Path) -> None:
    """The numpy backend has none, and says which one it was given."""
    with pytest.raises(DcnrError, match=r"no device 5 to choose"):
        async with LocalCluster(tmp_path, 1, "numpy", devices=(5,)):
            pass
    assert strays(tmp_path) == []
