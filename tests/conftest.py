"""What every test may use: one real NATS server for the whole session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from dcnr.bus.server import NatsServer

pytest.register_assert_rewrite("tests.bus.contract", "tests.bus.lanes.contract")


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server of the whole session on a free port; use names of your own for buckets and subjects."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    asyncio.run(server.start())
    yield server
    asyncio.run(server.stop())


@pytest.fixture
def nats_url(nats_server: NatsServer) -> str:
    """Where the session's server answers."""
    return nats_server.url
