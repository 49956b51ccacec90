"""Many steps leave no task behind: neither in the orchestrator nor in agents, which share one event loop here."""

from __future__ import annotations

import asyncio
import gc
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.bus.memory import MemoryBroker
from tests.agents.tiny import TINY
from tests.integration.scripted import agents, info_of
from tests.orchestrator.running import User, make_data, orchestrator, user

STEPS, EVERY = 240, 10
SPREAD = 6
"""Tasks that may be under way in one moment and not in another: hops, uploads, reads."""


def reached(one: User, step: int) -> bool:
    """Whether that step was done."""
    return bool(one.steps) and one.steps[-1].step >= step


async def test_tasks_do_not_grow(tmp_path: Path) -> None:
    """Their number in the last third of a run is that of the second."""
    make_data(tmp_path)
    broker, counts = MemoryBroker(), list[int]()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(orchestrator(broker, tmp_path))
        await stack.enter_async_context(agents(broker, NumpyBackend(), [info_of("a"), info_of("b")]))
        one = await stack.enter_async_context(user(broker))
        await one.ask("network.create", file=TINY, file_name="tiny.yml")
        while len((await one.ask("pnode.list"))["pnodes"]) < 2:
            await asyncio.sleep(0.01)
        options = {"network": "tiny", "dataset": "text", "steps": STEPS, "batch": 2, "hyper": {"checkpoint_every": EVERY}, "session": "s"}
        await one.ask("session.create", **options)
        for step in range(EVERY, STEPS + 1, EVERY):
            await one.until(partial(reached, one, step))
            gc.collect()
            counts.append(len(asyncio.all_tasks()))
        await one.until_state("done")
    third = len(counts) // 3
    assert max(counts[-third:]) <= max(counts[third : 2 * third]) + SPREAD, counts
