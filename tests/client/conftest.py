"""An orchestrator and fake PNodes on a memory bus, and a client of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dcnr.bus.memory import MemoryBroker
from dcnr.client.cluster import Cluster, NetworkFile
from tests.orchestrator.fakes import NETWORK
from tests.orchestrator.running import fake_agents, make_data, orchestrator, user

SMALL = NetworkFile(NETWORK, "small.yml")


@pytest.fixture
def broker() -> MemoryBroker:
    """A server."""
    return MemoryBroker()


@pytest.fixture
async def cluster(broker: MemoryBroker, tmp_path: Path) -> AsyncIterator[Cluster]:
    """PNodes `a` and `b`, dataset `text`; no network yet."""
    make_data(tmp_path)
    bus = broker.connect()
    async with orchestrator(broker, tmp_path), user(broker), fake_agents(broker, "a", "b"), Cluster(bus) as one:
        yield one
    await bus.close()
