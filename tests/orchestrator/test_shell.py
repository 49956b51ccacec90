"""Orchestrators as processes: who leads, what a restart remembers, and what strangers cannot break."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from dcnr.bus import codec, subjects
from dcnr.bus.api import call
from dcnr.bus.base import Bus
from dcnr.bus.disconnect import TYPE
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import TRAINER, Deployed, Hop, Undeploy
from dcnr.bus.transport import HopTransport
from dcnr.clock import ManualClock
from dcnr.data.dataset import Dataset
from dcnr.errors import DcnrError, InvariantError, UserError, WorldError
from dcnr.ids import Epoch, NetworkId, NodeId, PNodeId
from dcnr.orchestrator.api import Verb
from dcnr.orchestrator.cluster import Cluster
from dcnr.orchestrator.commands import Publish, SendHop, SetPeers
from dcnr.orchestrator.commands import Store as StoreRecord
from dcnr.orchestrator.fleet import CUT_OFF
from dcnr.orchestrator.leader import BUCKET, KEY, Holder, Lease, LeaseLost
from dcnr.orchestrator.session import Settings
from dcnr.orchestrator.shell import EPOCHS, Outside, Term, answering, probe
from dcnr.orchestrator.state import Records, SessionState
from dcnr.orchestrator.store import Store
from dcnr.storage.base import open_storage
from dcnr.storage.file import Buffer, FileStorage
from tests.orchestrator.fakes import NETWORK, SESSION, info, record
from tests.orchestrator.running import PATIENCE, User, fake_agents, make_data, orchestrator, user

RUN: dict[str, Any] = {
    "network": "small",
    "dataset": "text",
    "steps": 100_000,
    "batch": 4,
    "session": "s",
    "hyper": {"checkpoint_every": 2},
}


class Broken(FileStorage):
    """Storage that neither takes nor gives anything."""

    async def put(self, key: str, *data: Buffer) -> None:
        """No room."""
        raise WorldError(f"{key}: no room")

    async def sizes(self, prefix: str) -> dict[str, int]:
        """No answer."""
        raise WorldError(f"{prefix}: no answer")


def hop_to(pnode: str) -> SendHop:
    """A hop of nobody's session."""
    payload = np.zeros((1, 4), np.int64)
    header = Hop(
        NetworkId("small"), SESSION, Epoch(1), 1, 0, 0, "fwd", TRAINER, 0, ((NodeId("embed"), 0),), PNodeId("one"), "int64",
        payload.shape, 0.0,
    )  # fmt: skip
    return SendHop(PNodeId(pnode), header, payload)


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
    await (await broker.connect().kv(BUCKET)).put(KEY, codec.pack(asdict(Holder("dead", 0.0))))
    async with orchestrator(broker, tmp_path, "heir"), user(broker):
        assert await leader_of(broker) == "heir"


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


async def until_saved(asked: User, step: int) -> None:
    """Wait until session `s` has a complete checkpoint of `step` or later."""
    async with asyncio.timeout(PATIENCE):
        while max((await asked.ask("session.show", session="s"))["checkpoints"], default=0) < step:
            await asyncio.sleep(0.01)


async def test_a_new_leader_goes_on_where_the_old_one_left_no_step_lost_and_none_done_twice(tmp_path: Path) -> None:
    """The PNodes hold everything; the rows of the new leader begin with the last step of the old one, or soon after it."""
    make_data(tmp_path)
    broker = MemoryBroker()
    async with fake_agents(broker, "a", "b"):
        async with orchestrator(broker, tmp_path, "one"), user(broker) as asked:
            await asked.ask("network.create", file=NETWORK)
            await asked.ask("session.create", **RUN)
            await until_saved(asked, 4)
            before, old = await asked.ask("session.show", session="s"), asked.steps
        async with orchestrator(broker, tmp_path, "two"), user(broker) as asked:
            await asked.until(lambda: len(asked.steps) >= 10)
            after = await asked.ask("session.show", session="s")
            assert after["epoch"] == before["epoch"]
            steps = [row.step for row in asked.steps]
            assert old[-1].step <= steps[0]
            assert steps == list(range(steps[0], steps[0] + len(steps)))
            await asked.ask("session.suspend", session="s")
            await asked.until_state("suspended")


async def test_a_session_whose_pnodes_went_with_the_orchestrator_waits_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """From the buckets and storage alone, as soon as there is a PNode; its epochs are larger than all of the earlier leader."""
    make_data(tmp_path)
    broker = MemoryBroker()
    async with orchestrator(broker, tmp_path), user(broker) as asked, fake_agents(broker, "a", "b"):
        await asked.ask("network.create", file=NETWORK)
        await asked.ask("session.create", **RUN)
        await until_saved(asked, 4)
        before = await asked.ask("session.show", session="s")
    async with orchestrator(broker, tmp_path), user(broker) as asked:
        await asked.until_state("waiting")
        async with fake_agents(broker, "c"):
            await asked.until(lambda: len(asked.steps) >= 2)
            after = await asked.ask("session.show", session="s")
            assert after["epoch"] // EPOCHS > before["epoch"] // EPOCHS > 0
            assert before["checkpoints"][-1] < asked.steps[0].step
            await asked.ask("session.suspend", session="s")
            await asked.until_state("suspended")


async def test_a_session_whose_network_no_longer_loads_fails_and_the_leader_goes_on(tmp_path: Path) -> None:
    """With the reason; it may have been written by a version that knew more."""
    broker = MemoryBroker()
    store = await Store.open(broker.connect(), 1)
    await store.put(replace(record(), network_file="nodes: 7", state=SessionState.WAITING))
    async with orchestrator(broker, tmp_path), user(broker) as asked:
        shown = await asked.ask("session.show", session="s")
        assert shown["state"] == "failed"
        assert "small.yml" in shown["reason"]


@asynccontextmanager
async def leading(bus: Bus, folder: Path, clock: ManualClock) -> AsyncIterator[Term]:
    """A term without sessions, which only performs what a test tells it to."""
    lease = Lease(await bus.kv(BUCKET), "one", clock)
    await lease.acquire()
    transport = HopTransport(bus, PNodeId("one"), "elsewhere", lambda _hop, _payload: None)
    outside = Outside(bus, transport, FileStorage(folder), folder, PNodeId("one"), clock, asyncio.Queue())
    cluster = Cluster(Records(), {}, Settings(outside.me, outside.storage.url), clock.now())
    async with asyncio.TaskGroup() as group:
        yield Term(outside, cluster, await Store.open(bus, lease.term), lease, group)
    await transport.close()


async def test_a_leader_that_was_stopped_for_long_performs_nothing(tmp_path: Path) -> None:
    """Another may lead by then: it knows that before the first command, whatever it is."""
    bus, clock, heard = MemoryBroker().connect(), ManualClock(), list[bytes]()
    await bus.subscribe("dcnr.>", heard.append)
    async with leading(bus, tmp_path, clock) as term:
        term.perform(SetPeers(()))
        clock.advance(20.0)
        for command in (SetPeers(()), Publish("dcnr.pnode.a.cmd", Undeploy(SESSION, Epoch(1))), StoreRecord(record())):
            with pytest.raises(LeaseLost):
                term.perform(command)
    await bus.close()
    assert heard == []


async def test_hops_to_a_pnode_that_is_gone_are_dropped(tmp_path: Path) -> None:
    """Nobody waits for them; a PNode that comes back begins with none."""
    bus = MemoryBroker().connect()
    async with leading(bus, tmp_path, ManualClock()) as term:
        term.perform(SetPeers((info("a"), info("b"))))
        term.perform(hop_to("a"))
        term.perform(hop_to("b"))
        term.perform(SetPeers((info("b"),)))
        assert term._hops.keys() == {"b"}
        term.perform(SetPeers(()))
    await bus.close()


async def test_storage_that_takes_nothing_does_not_keep_an_orchestrator_from_leading(tmp_path: Path) -> None:
    """A full disk stops no training, and a storage that cannot be read stops no takeover."""
    broker = MemoryBroker()
    store = await Store.open(broker.connect(), 1)
    await store.put(replace(record(), state=SessionState.RUNNING, epoch=Epoch(1)))
    async with orchestrator(broker, tmp_path, storage=Broken(tmp_path)), user(broker) as asked:
        assert (await asked.ask("session.show", session="s"))["state"] in ("adopting", "waiting")


async def test_pnodes_are_told_of_a_blob_that_shows_whether_they_see_the_same_folder(tmp_path: Path) -> None:
    """It is there while there is a leader; what a killed one left is removed by the next; a storage in the network needs none."""
    storage = FileStorage(tmp_path)
    for left in ("probes/ours/old", "probes/theirs/key"):
        await storage.put(left, b"")
    async with probe(storage, "ours") as key:
        assert key is not None
        assert await storage.list("probes/") == [key, "probes/theirs/key"]
    assert await storage.list("probes/") == ["probes/theirs/key"], "another cluster may use the same storage"
    async with probe(open_storage("s3://bucket"), "ours") as key:
        assert key is None


@pytest.mark.parametrize("error", [WorldError("no room"), UserError("read-only", "make it writable")])
async def test_a_storage_that_takes_no_probe_is_no_reason_to_stop(tmp_path: Path, error: DcnrError) -> None:
    """Then PNodes are not asked whether they see it."""

    class Refusing(FileStorage):
        async def put(self, key: str, *data: Buffer) -> None:
            raise error

    async with probe(Refusing(tmp_path), "ours") as key:
        assert key is None


async def test_a_batch_that_the_disk_does_not_give_ends_its_session_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the system says; the orchestrator leads on."""

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    make_data(tmp_path)
    monkeypatch.setattr(Dataset, "batch", broken)
    broker = MemoryBroker()
    async with orchestrator(broker, tmp_path), fake_agents(broker, "a"), user(broker) as asked:
        await asked.ask("network.create", file=NETWORK)
        await asked.ask("session.create", **RUN)
        async with asyncio.timeout(PATIENCE):
            while (shown := await asked.ask("session.show", session="s"))["state"] != "failed":
                await asyncio.sleep(0.02)
        assert "Input/output error" in shown["reason"]


async def test_a_pnode_that_is_gone_is_found_by_its_silence_and_sooner_by_the_news_of_the_server(tmp_path: Path) -> None:
    """The leader hears itself, so silence counts; each has its reason in words. News of other connections change nothing."""
    broker = MemoryBroker()
    bus = broker.connect()
    async with orchestrator(broker, tmp_path), user(broker) as asked:
        async with fake_agents(broker, "a", "b"):
            await until_pnodes(asked, a="alive", b="alive")
        for name in ("b-control", "a-tensors", "c-control", ""):
            client = {"name": name, "id": 7}
            await bus.publish(subjects.DISCONNECTS, json.dumps({"type": TYPE, "client": client, "reason": "Client Closed"}).encode())
        shown = await until_pnodes(asked, b="dead")
        assert CUT_OFF in shown["b"]["reason"]
        assert shown["a"]["state"] != "dead"
        shown = await until_pnodes(asked, a="dead")
        assert "silent for 3" in shown["a"]["reason"]
    await bus.close()


async def until_pnodes(asked: User, **states: str) -> dict[str, dict[str, Any]]:
    """Wait until PNodes are in these states; what is shown of all of them then."""
    async with asyncio.timeout(PATIENCE):
        while True:
            shown = {row["pnode"]: row for row in (await asked.ask("pnode.list"))["pnodes"]}
            if all(name in shown and shown[name]["state"] == state for name, state in states.items()):
                return shown
            await asyncio.sleep(0.01)


async def test_messages_that_break_the_protocol_change_nothing(tmp_path: Path) -> None:
    """Garbage, a wrong type, an unknown session: the leader goes on."""
    broker = MemoryBroker()
    async with orchestrator(broker, tmp_path), user(broker) as asked:
        bus = broker.connect()
        report = codec.encode(Deployed(PNodeId("a"), SESSION, Epoch(1), 0, 1))
        for data in (b"", b"\xff" * 100, report):
            await bus.publish("dcnr.net.small.report", data)
            await bus.publish("dcnr.pnode.a.heartbeat", data)
            await bus.publish("dcnr.peer.orchestrator.echo", data)
            await bus.publish(subjects.DISCONNECTS, data)
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
