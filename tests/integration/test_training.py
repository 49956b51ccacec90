"""The orchestrator and real agents on one memory bus: whole training runs through the API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.bus.memory import MemoryBroker
from dcnr.ids import SessionId
from dcnr.storage.base import open_storage
from dcnr.storage.checkpoint import read_manifest
from tests import tolerances
from tests.agents.tiny import TINY
from tests.integration.scripted import agents, info_of
from tests.orchestrator.running import User, make_data, orchestrator, user

RUN: dict[str, Any] = {"network": "tiny", "dataset": "text", "steps": 8, "batch": 6, "micro_batches": 3, "seed": 3, "session": "s"}
HYPER = {"lr": 0.02, "schedule": "cosine", "warmup_steps": 2, "clip_norm": 1.0}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory with dataset `text`."""
    make_data(tmp_path)
    return tmp_path


@asynccontextmanager
async def cluster(broker: MemoryBroker, data_dir: Path, names: Sequence[str]) -> AsyncIterator[User]:
    """An orchestrator, real agents, and a user who sees them all alive."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(orchestrator(broker, data_dir))
        await stack.enter_async_context(agents(broker, NumpyBackend(), [info_of(name) for name in names]))
        one = await stack.enter_async_context(user(broker))
        async with asyncio.timeout(20):
            while len((await one.ask("pnode.list"))["pnodes"]) < len(names):
                await asyncio.sleep(0.01)
        yield one


async def train(data_dir: Path, names: Sequence[str], file: str = TINY, **options: Any) -> list[tuple[float, float, float]]:
    """(loss, lr, gradient norm) of each step of one run."""
    async with cluster(MemoryBroker(), data_dir, names) as one:
        await one.ask("network.create", file=file, file_name="tiny.yml")
        await one.ask("session.create", **{**RUN, "hyper": HYPER, **options})
        await one.until_state("done")
        assert [row.step for row in one.steps] == list(range(1, options.get("steps", RUN["steps"]) + 1))
        return [(row.loss, row.lr, row.grad_norm) for row in one.steps]


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "plain"])
async def test_placement_is_invisible_in_every_number(tmp_path: Path, fuse: bool) -> None:
    """One, two and three agents: losses, rates and norms equal to the last bit, and the losses fall."""
    runs = []
    for count in (1, 2, 3):
        make_data(tmp_path / str(count))
        runs.append(await train(tmp_path / str(count), [f"agent-{number}" for number in range(count)], fuse=fuse))
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][-1][0] < runs[0][0][0]


@pytest.mark.parametrize("wire", ["fp16", "int8"])
async def test_a_rounding_wire_changes_the_loss_a_little_and_only_between_agents(tmp_path: Path, wire: str) -> None:
    """On one agent nothing is rounded; on two the losses differ, and fall as they should."""
    runs = {}
    for name, file, count in (("native", TINY, 2), ("one", f"wire: {wire}\n{TINY}", 1), ("two", f"wire: {wire}\n{TINY}", 2)):
        make_data(tmp_path / name)
        runs[name] = await train(tmp_path / name, [f"agent-{number}" for number in range(count)], file=file)
    assert runs["one"] == runs["native"]
    assert runs["two"] != runs["native"]
    for (loss, _, _), (other, _, _) in zip(runs["two"], runs["native"], strict=True):
        assert loss == pytest.approx(other, rel=tolerances.ROUNDED_WIRE)


@pytest.mark.parametrize("then", [("a", "b"), ("x",)], ids=["the same agents", "one other agent"])
async def test_suspend_stop_everything_start_resume_goes_on_bit_for_bit(tmp_path: Path, then: tuple[str, ...]) -> None:
    """The losses after a resume are those of the run that never stopped, also on other PNodes."""
    make_data(tmp_path / "whole")
    whole = await train(tmp_path / "whole", ["a", "b"])
    make_data(tmp_path / "cut")
    broker = MemoryBroker()
    async with cluster(broker, tmp_path / "cut", ["a", "b"]) as one:
        await one.ask("network.create", file=TINY, file_name="tiny.yml")
        await one.ask("session.create", **{**RUN, "hyper": HYPER})
        await one.until(lambda: len(one.steps) >= 2)
        await one.ask("session.suspend", session="s")
        await one.until_state("suspended")
        before = list(one.steps)
        assert len(before) < RUN["steps"]
    async with cluster(broker, tmp_path / "cut", then) as one:
        shown = await one.ask("session.show", session="s")
        assert (shown["state"], shown["step"]) == ("suspended", len(before))
        await one.ask("session.resume", session="s")
        await one.until_state("done")
        rows = before + one.steps
    assert [row.step for row in rows] == list(range(1, 9))
    assert [(row.loss, row.lr, row.grad_norm) for row in rows] == whole


async def test_checkpoints_are_complete_and_readable(data_dir: Path) -> None:
    """Step 0, every third and the last; each manifest names the tensors of every PNode."""
    await train(data_dir, ["a", "b"], hyper={**HYPER, "checkpoint_every": 3, "keep_last": 4})
    storage = open_storage(f"file://{data_dir}")
    manifests = [await read_manifest(storage, SessionId("s"), step) for step in (0, 3, 6, 8)]
    assert len({manifest.tensors for manifest in manifests}) <= 2  # step 0 may have no moments
    assert [len(manifest.parts) for manifest in manifests] == [2, 2, 2, 2]
    assert [manifest.state.updates for manifest in manifests] == [0, 3, 6, 8]


async def test_a_session_goes_on_without_an_agent_that_leaves_and_no_number_changes(tmp_path: Path) -> None:
    """The reason names it; the run ends on the one that stayed, with every loss of a run that had it alone."""
    steps = 60
    make_data(tmp_path / "whole")
    whole = await train(tmp_path / "whole", ["a"], steps=steps)
    make_data(tmp_path / "left")
    broker = MemoryBroker()
    async with cluster(broker, tmp_path / "left", ["a"]) as one:
        async with agents(broker, NumpyBackend(), [info_of("b")]):
            while len((await one.ask("pnode.list"))["pnodes"]) < 2:
                await asyncio.sleep(0.01)
            await one.ask("network.create", file=TINY, file_name="tiny.yml")
            await one.ask("session.create", **{**RUN, "steps": steps, "hyper": {**HYPER, "checkpoint_every": 2}})
            while max((await one.ask("session.show", session="s"))["checkpoints"], default=0) < 2:
                await asyncio.sleep(0.01)
        await one.until_state("done")
        assert any("PNode b was stopped; goes back to step" in state.reason for state in one.states)
        standing = {row.step: (row.loss, row.lr, row.grad_norm) for row in one.steps}
        assert [standing[step] for step in sorted(standing)] == whole


async def test_two_sessions_share_agents_and_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Both at once give the numbers of each alone, on one network and other seeds."""
    alone = {}
    for seed in (3, 4):
        make_data(tmp_path / str(seed))
        alone[seed] = await train(tmp_path / str(seed), ["a", "b"], seed=seed)
    make_data(tmp_path / "both")
    async with cluster(MemoryBroker(), tmp_path / "both", ["a", "b"]) as one:
        await one.listen("t")
        await one.ask("network.create", file=TINY, file_name="tiny.yml")
        for name, seed in (("s", 3), ("t", 4)):
            await one.ask("session.create", **{**RUN, "session": name, "seed": seed, "hyper": HYPER})
        await one.until(lambda: sum(state.state == "done" for state in one.states) == 2)
        for name, seed in (("s", 3), ("t", 4)):
            assert [(row.loss, row.lr, row.grad_norm) for row in one.steps if row.session == name] == alone[seed]


async def test_draining_moves_a_session_and_changes_no_number(tmp_path: Path) -> None:
    """The run goes on without the drained agent, from a checkpoint, bit for bit."""
    make_data(tmp_path / "whole")
    whole = await train(tmp_path / "whole", ["a"])
    make_data(tmp_path / "moved")
    async with cluster(MemoryBroker(), tmp_path / "moved", ["a", "b"]) as one:
        await one.ask("network.create", file=TINY, file_name="tiny.yml")
        await one.ask("session.create", **{**RUN, "hyper": HYPER})
        await one.until(lambda: len(one.steps) >= 2)
        await one.ask("pnode.drain", pnode="b")
        await one.until_state("done")
        assert any("moves away from PNode b" in state.reason for state in one.states)
        assert [(row.loss, row.lr, row.grad_norm) for row in one.steps] == whole


async def test_what_fits_nowhere_waits_with_the_numbers_and_goes_on_when_room_comes(data_dir: Path) -> None:
    """The orchestrator places by memory before any agent has to refuse."""
    broker = MemoryBroker()
    async with orchestrator(broker, data_dir), agents(broker, NumpyBackend(), [info_of("small", memory=2000)]), user(broker) as one:
        await one.ask("network.create", file=TINY, file_name="tiny.yml")
        await one.ask("session.create", **{**RUN, "hyper": HYPER})
        await one.until(lambda: "small" in one.states[-1].reason)
        assert one.states[-1].state == "waiting"
        async with agents(broker, NumpyBackend(), [info_of("large")]):
            await one.until_state("done")
