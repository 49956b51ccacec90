"""Orchestrators come and go: no step is lost, none is done twice, and whoever follows a session sees it to its end."""

from __future__ import annotations

import asyncio
import json
import signal
import time

import pytest

from tests.cli.conftest import command, environment
from tests.faults.cluster import Cluster, Session, Tensors
from tests.faults.proxy import FINE, Weather
from tests.faults.running import BEFORE, IN_FLIGHT, STEPS, begin, same_end

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="package")]

RESTARTED, STANDBY = 5.0, 8.0
"""Seconds that it may take until a step is done again: since a new process looks for the lease, and since the leader was killed."""
LOOKS = "waits for the lease"
SLOW = Weather(late=0.06)
"""So that a session lasts longer than the start of a command."""


def once_each(session: Session) -> None:
    """Every step was done once, in one deployment. (The row of the last step before a change of leader may be told twice.)"""
    rows = [row for _, row in session.rows]
    assert len({row.epoch for row in rows}) == 1
    steps = [row.step for row in rows]
    assert steps == sorted(steps)
    assert set(steps) == set(range(1, STEPS + 1))


async def test_a_restarted_orchestrator_goes_on_with_the_next_step(whole: Cluster, undisturbed: Tensors) -> None:
    """SIGKILL and a new start: the agents are adopted, every step is done once, and `dcnr session watch` sees it to its end."""
    whole.proxy.weather = SLOW
    session = await begin(whole)
    watch = await asyncio.create_subprocess_exec(
        *command("session", "watch", session.name, "--json"),
        env=environment(whole.data_dir, NATS_URL=whole.proxy.url),
        stdout=asyncio.subprocess.PIPE,
    )
    assert watch.stdout is not None
    assert json.loads(await watch.stdout.readline())["event"] == "step"
    before = looks(whole, "orchestrator-1")
    whole.processes.kill("orchestrator-1")
    whole.proxy.weather = FINE
    whole.processes.again("orchestrator-1")
    await whole.until(lambda: looks(whole, "orchestrator-1") > before, "the new process looks for the lease")
    assert await session.until_trains(time.monotonic()) <= RESTARTED
    await same_end(session, undisturbed)
    once_each(session)
    out, _ = await asyncio.wait_for(watch.communicate(), 20)
    assert watch.returncode == 0
    assert json.loads(out.splitlines()[-1])["event"] == "done"


def looks(whole: Cluster, name: str) -> int:
    """How many processes of that name have looked for the lease."""
    log = whole.processes.log(name)
    return log.read_text().count(LOOKS) if log.exists() else 0


async def stand_by(whole: Cluster) -> None:
    """A second orchestrator, which waits."""
    before = looks(whole, "orchestrator-2")
    whole.start_orchestrator("orchestrator-2")
    await whole.until(lambda: looks(whole, "orchestrator-2") > before, "the second one stands by")


async def test_a_standby_takes_over(whole: Cluster, undisturbed: Tensors) -> None:
    """The other one leads, without a step lost or repeated."""
    await stand_by(whole)
    session = await begin(whole)
    await session.until_step(BEFORE)
    victim, began = await whole.leader(), time.monotonic()
    whole.processes.kill(victim)
    assert await session.until_trains(began + IN_FLIGHT) <= STANDBY
    await same_end(session, undisturbed)
    once_each(session)


async def test_a_stopped_leader_is_replaced_and_fenced(whole: Cluster, undisturbed: Tensors) -> None:
    """SIGSTOP: its process is there, so the lease has to expire; when it wakes up it is not the leader any more, and knows it."""
    await stand_by(whole)
    session = await begin(whole)
    await session.until_step(BEFORE)
    victim, began = await whole.leader(), time.monotonic()
    whole.processes.signal(victim, signal.SIGSTOP)
    assert await session.until_trains(began + IN_FLIGHT) <= STANDBY
    whole.processes.signal(victim, signal.SIGCONT)
    await same_end(session, undisturbed)
    once_each(session)
    assert await whole.leader() != victim
