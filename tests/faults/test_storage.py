"""Storage that takes nothing stops no training."""

from __future__ import annotations

import resource
import sys

import psutil
import pytest

from tests.faults.cluster import Cluster, Tensors
from tests.faults.running import BEFORE, EVERY, begin, same_end

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="package")]

ROOM = 20_000
"""Bytes of a file: enough for logs, too few for a part of a checkpoint."""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes are Linux's")
async def test_a_full_disk_is_told_and_stops_no_training(whole: Cluster, undisturbed: Tensors) -> None:
    """The limit of a process stands for a full disk; once there is room, the last checkpoint is written."""
    session = await begin(whole)
    hosts = await session.hosts()
    try:
        for name in hosts:
            limit_files(whole.processes.process(name), ROOM)
        await session.until_step(BEFORE + 2 * EVERY)
        assert "could not save checkpoint" in (await session.ask("show"))["reason"]
    finally:  # the next test has the same agents
        for name in hosts:
            limit_files(whole.processes.process(name), resource.RLIM_INFINITY)
    await same_end(session, undisturbed)


def limit_files(process: psutil.Process, size: int) -> None:
    """How large its files may become from now on."""
    process.rlimit(psutil.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
