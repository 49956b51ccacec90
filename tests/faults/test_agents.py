"""Whatever happens to an agent, training goes on by itself, and the weights are those of the undisturbed run, bit for bit."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from tests.faults.cluster import LOOK_EVERY, SABOTEUR, Cluster, Tensors
from tests.faults.moments import PHASES, Phase, Trap
from tests.faults.proxy import FINE, Weather
from tests.faults.running import BEFORE, STEPS, begin, same_end

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="package")]

FOUND_BY_DISCONNECT, FOUND_BY_SILENCE, TRAINS = 1.0, 4.0, 10.0
"""Seconds that it may take until a loss is known, and until a step is done again."""
BUSY = 1.0
"""What is added for a machine that has other things to do."""
SLOW = Weather(late=0.06)
"""So that a session lasts longer than the start of an agent."""


@pytest.mark.parametrize("phase", PHASES)
async def test_a_killed_agent_changes_nothing(whole: Cluster, undisturbed: Tensors, phase: Phase) -> None:
    """SIGKILL while it does its part of a step; known through the server's disconnect events."""
    session = await begin(whole)
    first = (await session.hosts())[0]
    trap = Trap(whole.proxy, phase, BEFORE, lambda who: whole.processes.kill(who if who.startswith("agent") else first))
    await whole.until(lambda: trap.sprung_at is not None, f"something of {phase}")
    assert trap.sprung_at is not None
    assert await session.until_trains_anew(trap.sprung_at) <= TRAINS
    assert session.found_after(trap.sprung_at) <= FOUND_BY_DISCONNECT + BUSY
    await same_end(session, undisturbed)


async def test_an_agent_killed_while_idle_changes_nothing(whole: Cluster, undisturbed: Tensors) -> None:
    """Its session is suspended, and goes on without it."""
    session = await begin(whole)
    hosts = await session.hosts()
    await session.ask("suspend")
    await session.until_state("suspended")
    whole.processes.kill(hosts[0])
    await session.ask("resume")
    await same_end(session, undisturbed)


async def test_a_stopped_agent_is_found_by_its_silence_and_fenced_when_it_wakes(whole: Cluster, undisturbed: Tensors) -> None:
    """SIGSTOP; the others hardly use the CPU while they wait; it comes back as a zombie whose words do not count, and is taken back."""
    session = await begin(whole)
    victim, other = await session.hosts()
    began = time.monotonic()
    whole.processes.signal(victim, signal.SIGSTOP)
    used = sum(whole.processes.process(other).cpu_times()[:2])
    await whole.until(lambda: session.states[-1][0] > began, "the loss is known")
    waited = session.found_after(began)
    assert waited <= FOUND_BY_SILENCE + BUSY
    assert sum(whole.processes.process(other).cpu_times()[:2]) - used < 0.05 * waited + 0.1
    assert await session.until_trains_anew(began) <= TRAINS
    whole.processes.signal(victim, signal.SIGCONT)
    await same_end(session, undisturbed)
    await whole.until_alive(victim)


async def test_an_agent_that_stops_in_order_is_replaced(whole: Cluster, undisturbed: Tensors) -> None:
    """SIGTERM: it says good-bye."""
    session = await begin(whole)
    await session.until_step(BEFORE)
    victim, began = (await session.hosts())[0], time.monotonic()
    whole.processes.signal(victim, signal.SIGTERM)
    assert await session.until_trains_anew(began) <= TRAINS
    assert await asyncio.to_thread(whole.processes.wait, victim, 10) == 0
    await same_end(session, undisturbed)


async def test_a_drained_agent_is_left_without_a_step_lost(whole: Cluster, undisturbed: Tensors) -> None:
    """It ends up with nothing, and no step is done twice."""
    session = await begin(whole)
    await session.until_step(BEFORE)
    victim = (await session.hosts())[0]
    await whole.ask("pnode.drain", pnode=victim)
    await same_end(session, undisturbed)
    steps = [row.step for _, row in session.rows]
    assert steps == sorted(set(steps))
    assert (await whole.ask("pnode.show", pnode=victim))["vnodes"] == 0
    whole.processes.kill(victim)  # a new process of that name is not drained


async def test_without_an_agent_left_a_session_waits_and_goes_on_when_one_joins(whole: Cluster, undisturbed: Tensors) -> None:
    """It says what it waits for."""
    session = await begin(whole, pnodes=1)
    await session.until_step(BEFORE)
    for name in whole.processes.names("agent"):
        whole.processes.kill(name)
    await session.until_state("waiting")
    await whole.until(lambda: "PNode" in session.states[-1][1].reason, "it says that it needs a PNode")
    whole.processes.again("agent-2")
    await same_end(session, undisturbed)


async def test_an_agent_that_joins_gets_a_part(whole: Cluster, undisturbed: Tensors) -> None:
    """A session that takes all PNodes moves a part to it at a checkpoint, and no step is lost."""
    late = whole.agents[-1]
    await whole.until_alive(late)
    whole.processes.signal(late, signal.SIGSTOP)
    await whole.until_gone(late)
    whole.proxy.weather = SLOW
    session = await begin(whole, pnodes=0)
    assert late not in await session.hosts()
    whole.processes.signal(late, signal.SIGCONT)
    while late not in await session.hosts():
        assert session.step < STEPS, f"{session} ended before it was spread"
        await asyncio.sleep(LOOK_EVERY)
    whole.proxy.weather = FINE
    await same_end(session, undisturbed)
    steps = [row.step for _, row in session.rows]
    assert steps == sorted(set(steps))


async def test_a_failing_node_fails_its_session_at_once(whole: Cluster, undisturbed: Tensors) -> None:
    """With what it raised; the traceback is in the agent's log, and the agent goes on with others."""
    await whole.mend(len(whole.agents))
    session = await begin(whole, pnodes=len(whole.agents))
    whole.sabotage("raise")
    began = time.monotonic()
    await session.until_state("failed")
    assert time.monotonic() - began < FOUND_BY_SILENCE
    assert "Sabotage: something in a node" in session.states[-1][1].reason
    assert "in disturb" in whole.processes.log(SABOTEUR).read_text()
    await session.ask("resume")
    await same_end(session, undisturbed)


async def test_a_job_that_takes_long_is_no_death(whole: Cluster, undisturbed: Tensors) -> None:
    """It computes for longer than silence or a lost message are given; nobody moves and no step is repeated."""
    await whole.mend(len(whole.agents))
    session = await begin(whole, pnodes=len(whole.agents))
    whole.sabotage("compute", "5")
    await same_end(session, undisturbed)
    assert {row.epoch for _, row in session.rows} == {session.rows[0][1].epoch}
    assert max(row.step_ms for _, row in session.rows) > 4900


async def test_an_agent_whose_loop_is_blocked_is_replaced(whole: Cluster, undisturbed: Tensors) -> None:
    """It says nothing for longer than an agent may; what it says afterwards does not count."""
    await whole.mend(len(whole.agents))
    session = await begin(whole, pnodes=0)
    began = time.monotonic()
    whole.sabotage("loop", "6")
    assert await session.until_trains_anew(began) <= TRAINS
    assert session.found_after(began) <= FOUND_BY_SILENCE + BUSY
    assert f"PNode {SABOTEUR}" in session.first_told_after(began).reason
    await same_end(session, undisturbed)
