"""A local cluster becomes ready, reports deaths, and stops whole."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from dcnr.cli.cluster import LocalCluster, places
from dcnr.errors import DcnrError, UserError
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


async def test_a_dead_agent_is_a_line_and_the_last_one_the_end(tmp_path: Path) -> None:
    """The first death is noted; the second leaves nobody to work."""
    notes: list[str] = []
    heard = asyncio.Event()

    def note(line: str) -> None:
        notes.append(line)
        heard.set()

    async def work() -> None:
        psutil.Process(pid_of(tmp_path, "agent-1")).kill()
        await heard.wait()
        psutil.Process(pid_of(tmp_path, "agent-2")).kill()
        await asyncio.Event().wait()

    async with LocalCluster(tmp_path, 2, "numpy") as cluster:
        with pytest.raises(DcnrError, match="agent-2 was ended by SIGKILL"):
            await cluster.run_beside(work(), note)
    assert [line.split(" (log")[0] for line in notes] == ["agent-1 was ended by SIGKILL"]
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
