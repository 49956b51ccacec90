"""Orchestrators as processes: who leads, what a restart remembers, and what strangers cannot break."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from dcnr.bus import codec
from dcnr.bus.api import call
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import Deployed
from dcnr.bus.transport import HopTransport
from dcnr.errors import InvariantError, WorldError
from dcnr.ids import Epoch, NetworkId, PNodeId
from dcnr.orchestrator.api import Verb
from dcnr.orchestrator.leader import BUCKET, KEY, Holder
from dcnr.orchestrator.shell import RecordWriter, Shell, answering
from dcnr.orchestrator.state import NetworkRecord, Record
from dcnr.orchestrator.store import Store
from tests.orchestrator.fakes import NETWORK, SESSION
from tests.orchestrator.running import PATIENCE, fake_agents, make_data, orchestrator, user

RUN: dict[str, Any] = {
    "network": "small",
    "dataset": "text",
    "steps": 100_000,
    "batch": 4,
    "session": "s",
    "hyper": {"checkpoint_every": 2},
}


class FastClock:
    """Ten seconds a second."""

    def now(self) -> float:
        """Seconds."""
        return time.monotonic() * 10


async def leader_of(broker: MemoryBroker) -> str:
    """Who answers."""
    bus = broker.connect()
    try:
        name: str = (await call(bus, "cluster.info"))["orchestrator"]
        return name
    finally:
        await bus.close()


async def test_of_two_orchestrators_one_leads_and_the_other_takes_over(tmp_path: Path) -> None:
    """What the first knew, the second knows, as soon as the first has left in order."""
    make_data(tmp_path)
    broker = MemoryBroker()
    async with orchestrator(broker, tmp_path, "two") as second:
        async with user(broker):
            assert await leader_of(broker) == "two"
        del second
        async with orchestrator(broker, tmp_path, "one"), user(broker) as asked:
            await asked.ask("network.create", file=NETWORK)
            assert await leader_of(broker) == "two"
    async with orchestrator(broker, tmp_path, "one"), user(broker) as asked:
        assert await leader_of(broker) == "one"
        assert [row["name"] for row in (await asked.ask("network.list"))["networks"]] == ["small"]


async def test_a_standby_takes_over_from_a_leader_that_vanished(tmp_path: Path) -> None:
    """A lease that nobody renews is taken by the follower's clock."""
    broker = MemoryBroker()
    bus = broker.connect()
    await (await bus.kv(BUCKET)).put(KEY, codec.pack(asdict(Holder("dead", 0.0))))
    me = PNodeId("heir")
    transport = HopTransport(broker.connect(), me, "elsewhere", lambda _hop, _payload: None)
    task = asyncio.create_task(Shell(bus, transport, tmp_path, me, FastClock()).run())
    async with user(broker):
        assert await leader_of(broker) == "heir"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await transport.close()


async def test_a_leader_whose_lease_is_taken_stands_by(tmp_path: Path) -> None:
    """It serves no more, and leads again when the lease is free."""
    broker = MemoryBroker()
    async with orchestrator(broker, tmp_path), user(broker) as asked:
        kv = await broker.connect().kv(BUCKET)
        await kv.put(KEY, codec.pack(asdict(Holder("thief", 0.0))))
        async with asyncio.timeout(PATIENCE):
            while any(interest.pattern.startswith("dcnr.api") for interest in broker.interests):
                await asyncio.sleep(0.02)
        await kv.put(KEY, codec.pack(asdict(Holder("", 0.0))))
        async with asyncio.timeout(PATIENCE):
            while not any(interest.pattern.startswith("dcnr.api") for interest in broker.interests):
                await asyncio.sleep(0.02)
        assert (await asked.ask("cluster.info"))["orchestrator"] == "orchestrator"


async def test_a_session_that_ran_when_everything_stopped_is_suspended_and_resumable(tmp_path: Path) -> None:
    """From the buckets alone; the reason and the step say what happened, and the next epoch is a new one."""
    make_data(tmp_path)
    broker = MemoryBroker()
    async with orchestrator(broker, tmp_path), user(broker) as asked, fake_agents(broker, "a", "b"):
        await asked.ask("network.create", file=NETWORK)
        await asked.ask("session.create", **RUN)
        async with asyncio.timeout(PATIENCE):
            while max((await asked.ask("session.show", session="s"))["checkpoints"], default=0) < 4:
                await asyncio.sleep(0.01)
    async with orchestrator(broker, tmp_path), user(broker) as asked:
        shown = await asked.ask("session.show", session="s")
        assert shown["state"] == "suspended"
        assert "the orchestrator stopped while it was running" in shown["reason"]
        assert shown["step"] == shown["checkpoints"][-1] >= 2
        async with fake_agents(broker, "c"):
            await asked.ask("session.resume", session="s")
            await asked.until(lambda: len(asked.steps) >= 2)
            again = await asked.ask("session.show", session="s")
            assert asked.steps[0].step - 1 >= shown["step"]
            assert asked.steps[0].step - 1 in again["checkpoints"]
            assert again["epoch"] > shown["epoch"]
            await asked.ask("session.suspend", session="s")
            await asked.until_state("suspended")


async def test_messages_that_break_the_protocol_change_nothing(tmp_path: Path) -> None:
    """Garbage, a wrong type, an unknown session: the leader goes on."""
    broker = MemoryBroker()
    async with orchestrator(broker, tmp_path), user(broker) as asked:
        bus = broker.connect()
        report = codec.encode(Deployed(PNodeId("a"), SESSION, Epoch(1), 0, 1))
        for data in (b"", b"\xff" * 100, report):
            await bus.publish("dcnr.net.small.report", data)
            await bus.publish("dcnr.pnode.a.heartbeat", data)
        assert (await asked.ask("pnode.list")) == {"pnodes": []}
        assert (await asked.ask("session.list")) == {"sessions": []}


async def test_a_bug_in_a_verb_is_an_answer() -> None:
    """The user is told that it is not their fault, and nobody waits for ever."""

    class Anything(BaseModel):
        """No fields."""

    async def broken(_request: Anything) -> dict[str, Any]:
        raise ZeroDivisionError("oops")

    bus = MemoryBroker().connect()
    await bus.serve("dcnr.api.some.verb", answering(Verb("some.verb", Anything, broken)))
    with pytest.raises(InvariantError, match=r"some\.verb failed inside the orchestrator: ZeroDivisionError: oops"):
        await call(bus, "some.verb")
    await bus.close()


class Unwilling(Store):
    """A store that fails `failures` times, and remembers what it took."""

    def __init__(self, failures: int) -> None:
        super().__init__({})
        self.failures = failures
        self.taken: list[int] = []

    async def put(self, record: Record) -> None:
        """Fail, or take the record."""
        if self.failures:
            self.failures -= 1
            raise WorldError("no answer")
        assert isinstance(record, NetworkRecord)
        self.taken.append(record.revision)


async def test_a_record_is_written_again_until_the_bus_takes_it_and_only_its_newest_value() -> None:
    """Three changes while the bus is away are one write."""
    store = Unwilling(failures=1)
    writer = RecordWriter(store)
    for revision in (1, 2, 3):
        writer.put(NetworkRecord(NetworkId("small"), "", "", 1, 1, revision))
    task = asyncio.create_task(writer.run())
    async with asyncio.timeout(PATIENCE):
        while not store.taken:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert store.taken == [3]


async def test_nobody_waits_for_a_record_that_will_not_be_written() -> None:
    """An orchestrator that stops says so to whoever asked last."""
    writer = RecordWriter(Unwilling(failures=1000))
    writer.put(NetworkRecord(NetworkId("small"), "", "", 1, 1, 1))
    waiting = asyncio.create_task(writer.settled())
    await asyncio.sleep(0)
    writer.give_up()
    with pytest.raises(WorldError, match="before everything was written"):
        await waiting
