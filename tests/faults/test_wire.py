"""What networks do to connections and messages changes no bit."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.faults.cluster import Cluster, Tensors
from tests.faults.proxy import FINE, Direction, Weather
from tests.faults.running import BEFORE, IN_FLIGHT, begin, same_end

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="package")]

TRAINS = 10.0
"""Seconds that it may take until a step is done again."""
STORMS = {
    "1 % lost": Weather(loss=0.01),
    "twice and overtaken": Weather(twice=0.05, overtaken=0.05),
    "late": Weather(late=0.02),
}


@pytest.mark.parametrize("storm", STORMS)
async def test_bad_weather_changes_nothing(whole: Cluster, undisturbed: Tensors, storm: str) -> None:
    """All messages of ours, heartbeats included, for the whole of the run."""
    whole.proxy.weather = STORMS[storm]
    session = await begin(whole)
    await session.until_state("done")
    whole.proxy.weather = FINE
    await same_end(session, undisturbed)


@pytest.mark.parametrize("client", ["", "agent", "orchestrator"])
async def test_cut_connections_change_nothing(whole: Cluster, undisturbed: Tensors, client: str) -> None:
    """Everyone's, an agent's, the leader's: they reconnect, and what was lost is done again."""
    session = await begin(whole)
    await session.until_step(BEFORE)
    if client == "agent":
        client = (await session.hosts())[0]
    began = time.monotonic()
    assert whole.proxy.cut(client) > 0
    assert await session.until_trains(began + IN_FLIGHT) <= TRAINS
    await same_end(session, undisturbed)


@pytest.mark.parametrize(("client", "direction"), [("agent", "up"), ("agent", "down"), ("orchestrator", "down")])
async def test_a_dead_direction_changes_nothing(whole: Cluster, undisturbed: Tensors, client: str, direction: Direction) -> None:
    """An agent that is not heard or hears nothing, a leader that hears nothing."""
    session = await begin(whole, pnodes=2)
    await session.until_step(BEFORE)
    if client == "agent":
        client = (await session.hosts())[0]
    began = time.monotonic()
    assert whole.proxy.deafen(direction, client) > 0
    assert await session.until_trains(began + IN_FLIGHT) <= 2 * TRAINS
    await same_end(session, undisturbed)


async def test_a_stall_changes_nothing(whole: Cluster, undisturbed: Tensors) -> None:
    """Nothing moves for longer than an agent may be silent: nobody is taken for dead, since the leader does not hear itself either."""
    session = await begin(whole)
    await session.until_step(BEFORE)
    whole.proxy.stall()
    await asyncio.sleep(4)
    whole.proxy.flow()
    await same_end(session, undisturbed)
    assert len({row.epoch for _, row in session.rows}) == 1
