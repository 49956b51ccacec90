"""The rest of the faults, which takes minutes: `make chaos` runs it (pytest tests/faults/matrix.py)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.acceptance.networks import VOCABULARY
from tests.acceptance.running import make_dataset, same_bits
from tests.faults.cluster import Cluster, Tensors
from tests.faults.moments import PHASES, Phase, Trap
from tests.faults.proxy import FINE, Proxy, Weather
from tests.faults.running import BEFORE, EVERY, begin, same_end
from tests.faults.trio import Trio

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="package")]

TRIO_TRAINS = 12.0
"""Seconds: an election of the servers stops writes for 4 to 9."""
MANY = 400
"""Steps that last longer than an election."""
STORMS = {"5 % lost": Weather(loss=0.05), "everything": Weather(loss=0.02, twice=0.02, overtaken=0.02, late=0.01)}
ALONE: tuple[Phase, ...] = ("feeding", "reporting", "checkpointing")
"""What is said where one PNode holds everything."""


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("phase", PHASES)
async def test_any_agent_killed_in_any_phase_changes_nothing(whole: Cluster, undisturbed: Tensors, phase: Phase, who: int) -> None:
    """Of three that hold parts, whoever speaks; two are left."""
    session = await begin(whole, pnodes=3)
    hosts = await session.hosts()
    trap = Trap(whole.proxy, phase, BEFORE, lambda _: whole.processes.kill(hosts[who]))
    await whole.until(lambda: trap.sprung_at is not None, f"something of {phase}")
    whole.processes.again(hosts[who])
    await same_end(session, undisturbed)


@pytest.mark.parametrize("phase", ALONE)
async def test_the_only_agent_killed_in_any_phase_changes_nothing(whole: Cluster, undisturbed: Tensors, phase: Phase) -> None:
    """One that decides for itself, and is steps ahead of what the orchestrator knows."""
    session = await begin(whole, pnodes=1)
    (host,) = await session.hosts()
    trap = Trap(whole.proxy, phase, BEFORE, lambda _: whole.processes.kill(host))
    await whole.until(lambda: trap.sprung_at is not None, f"something of {phase}")
    await same_end(session, undisturbed)


@pytest.mark.parametrize("phase", PHASES)
async def test_a_leader_killed_in_any_phase_changes_nothing(whole: Cluster, undisturbed: Tensors, phase: Phase) -> None:
    """And started again: every step once."""
    session = await begin(whole)
    trap = Trap(whole.proxy, phase, BEFORE, lambda _: whole.processes.kill("orchestrator-1"))
    await whole.until(lambda: trap.sprung_at is not None, f"something of {phase}")
    whole.processes.again("orchestrator-1")
    await same_end(session, undisturbed)
    assert len({row.epoch for _, row in session.rows}) == 1


@pytest.mark.parametrize("phase", PHASES)
async def test_a_server_killed_in_any_phase_changes_nothing(whole: Cluster, undisturbed: Tensors, phase: Phase) -> None:
    """And started again on its store."""
    session = await begin(whole)
    trap = Trap(whole.proxy, phase, BEFORE, lambda _: whole.kill_server())
    await whole.until(lambda: trap.sprung_at is not None, f"something of {phase}")
    await whole.restart_server()
    await same_end(session, undisturbed)


@pytest.mark.parametrize("storm", STORMS)
async def test_worse_weather_changes_nothing(whole: Cluster, undisturbed: Tensors, storm: str) -> None:
    """For the whole of the run; heartbeats too."""
    whole.proxy.weather = STORMS[storm]
    session = await begin(whole)
    await session.until_state("done", within=240)
    whole.proxy.weather = FINE
    await same_end(session, undisturbed)


async def test_agents_killed_one_after_the_other_change_nothing(whole: Cluster, undisturbed: Tensors) -> None:
    """The second while the loss of the first is being mended, and so on."""
    session = await begin(whole)
    for _ in range(4):
        victim = (await session.hosts() or ["agent-1"])[0]
        whole.processes.kill(victim)
        whole.processes.again(victim)
        await asyncio.sleep(1.2)
    await same_end(session, undisturbed)


async def test_an_agent_and_the_leader_killed_together_change_nothing(whole: Cluster, undisturbed: Tensors) -> None:
    """The new leader finds one that is missing."""
    session = await begin(whole)
    await session.until_step(BEFORE)
    whole.processes.kill((await session.hosts())[0])
    whole.processes.kill("orchestrator-1")
    whole.processes.again("orchestrator-1")
    await same_end(session, undisturbed)


async def test_an_agent_that_computes_for_half_a_minute_is_alive(whole: Cluster, undisturbed: Tensors) -> None:
    """Nobody moves."""
    await whole.mend(len(whole.agents))
    session = await begin(whole, pnodes=len(whole.agents))
    whole.sabotage("compute", "30")
    await same_end(session, undisturbed)
    assert max(row.step_ms for _, row in session.rows) > 29_900
    assert {row.epoch for _, row in session.rows} == {session.rows[0][1].epoch}


async def test_a_cluster_of_servers_loses_its_leader(tmp_path: Path) -> None:
    """Writes pause for an election; the lease is not lost, and every step is done once."""
    make_dataset(tmp_path, VOCABULARY)
    trio, one = Trio(tmp_path / "servers"), Cluster(tmp_path, Proxy("", 0), tmp_path / "unused")
    try:
        await trio.start()
        await one.join(trio.url, trio.url, 2, 2)
        await one.register()
        session = await one.session("three-servers", MANY, EVERY)
        await session.until_step(BEFORE)
        leader = (await one.ask("cluster.info"))["orchestrator"]
        began = time.monotonic()
        trio.processes.kill(await trio.leader_of("dcnr_leader"))
        assert await session.until_trains(began) <= TRIO_TRAINS
        await session.until_state("done")
        assert session.rows[-1][0] - began > TRIO_TRAINS, "the run outlives the election"
        assert (await one.ask("cluster.info"))["orchestrator"] == leader
        assert len({row.epoch for _, row in session.rows}) == 1
        alone = await one.session("alone", MANY, 0, pnodes=1)
        await alone.until_state("done")
        assert same_bits(await session.tensors(MANY), await alone.tensors(MANY))
    finally:
        await one.close()
        trio.processes.stop_all()
