"""The server goes away and comes back: with what it had, or without."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster, Tensors
from tests.faults.running import BEFORE, begin, same_end

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="package")]

RESTARTED = 5.0
"""Seconds that it may take until a step is done again."""


async def test_a_server_that_was_killed_comes_back(whole: Cluster, undisturbed: Tensors) -> None:
    """SIGKILL, a pause, and a new start on the same store."""
    session = await begin(whole)
    await session.until_step(BEFORE)
    whole.kill_server()
    await asyncio.sleep(1)
    await whole.restart_server()
    assert await session.until_trains(time.monotonic()) <= RESTARTED
    await same_end(session, undisturbed)


async def test_a_wiped_store_is_reported_and_no_fresh_start(whole: Cluster, undisturbed: Tensors, tmp_path: Path) -> None:
    """Nothing is made anew in an empty server, and the orchestrator says so; with the old store, everything goes on."""
    session = await begin(whole)
    await session.until_step(BEFORE)
    whole.kill_server()
    log = whole.processes.log("orchestrator-1")
    before = log.stat().st_size
    await whole.restart_server(tmp_path / "empty")
    await whole.until(lambda: not whole.processes.runs("orchestrator-1"), "the orchestrator ends rather than begin anew")
    assert b"has no records of this cluster" in log.read_bytes()[before:]
    assert json.loads(await whole.bus.request("$JS.API.STREAM.NAMES", b"", 5.0))["total"] == 0
    whole.kill_server()
    await whole.restart_server(whole.store)
    whole.processes.again("orchestrator-1")
    await same_end(session, undisturbed)
