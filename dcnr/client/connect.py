"""Where a client begins: a connection to the NATS server, and through it to whichever orchestrator leads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dcnr.bus.base import Bus
from dcnr.client.cluster import Cluster
from dcnr.config import from_environment


@asynccontextmanager
async def connection(url: str | None = None) -> AsyncIterator[Bus]:
    """A bus, by default at `NATS_URL`, closed at the end."""
    from dcnr.bus.nats import connect as connect_nats  # half a second: only for those who connect

    bus = await connect_nats(from_environment(nats_url=url).nats_url, "dcnr")
    try:
        yield bus
    finally:
        await bus.close()


@asynccontextmanager
async def connect(url: str | None = None) -> AsyncIterator[Cluster]:
    """The cluster at `url` (by default `NATS_URL`, or this machine), until the block ends. Raises `BusUnavailable` if no server is there.

    Sessions go on without us: leaving the block ends only what is heard of them.
    """
    async with connection(url) as bus, Cluster(bus) as cluster:
        yield cluster
