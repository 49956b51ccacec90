"""Records in buckets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from dcnr.bus.base import Kv
from dcnr.bus.memory import MemoryBroker, MemoryKv
from dcnr.bus.nats import connect
from dcnr.errors import PeerError, WorldError
from dcnr.ids import Epoch, NetworkId, PNodeId
from dcnr.orchestrator.commands import Bucket, WriteManifest
from dcnr.orchestrator.leader import LeaseLost
from dcnr.orchestrator.shell import manifest_of
from dcnr.orchestrator.state import (
    AssignmentRecord,
    CheckpointRecord,
    NetworkRecord,
    PNodeRecord,
    PNodeState,
    Record,
    Records,
    SessionRecord,
    SessionState,
    key_of,
)
from dcnr.orchestrator.store import BUCKETS, Store, caught_up, newest_checkpoint
from dcnr.storage.base import open_storage
from dcnr.storage.checkpoint import write_manifest
from tests.orchestrator.fakes import NETWORK, SESSION, info, record

CHECKPOINT = CheckpointRecord(3, "key", {"updates": 3, "loss_scale": 65536.0, "good_steps": 1, "dynamic": True})
NETWORKS = NetworkRecord(NetworkId("small"), NETWORK * 100, "small.yml", 5, 300, 2)
SESSIONS = replace(record(lr=0.5, schedule="cosine"), state=SessionState.RUNNING, loss=1.25, checkpoints=(CHECKPOINT,))
ASSIGNMENTS = AssignmentRecord(SESSION, Epoch(2), {"embed": PNodeId("a")})
PNODES = PNodeRecord(info("a"), PNodeState.SUSPECT, "silent for 1.5 s", draining=True)


def test_every_record_is_read_back_as_it_was_written() -> None:
    """Enums, tuples, floats and nested records included; another store of the same broker sees them."""

    async def story() -> Records:
        broker = MemoryBroker(max_payload=64 << 10)
        store = await Store.open(broker.connect(), 1)
        records: tuple[Record, ...] = (NETWORKS, SESSIONS, ASSIGNMENTS, PNODES)
        for one in records:
            await store.put(one)
            await store.put(one)
        return await (await Store.open(broker.connect(), 2)).take_over()

    assert asyncio.run(story()) == Records((NETWORKS,), (SESSIONS,), (ASSIGNMENTS,), (PNODES,))


def test_a_dropped_record_is_gone_and_dropping_twice_is_fine() -> None:
    """Absent is absent."""

    async def story() -> Records:
        store = await Store.open(MemoryBroker().connect(), 1)
        await store.put(SESSIONS)
        await store.drop("dcnr_sessions", "s")
        await store.drop("dcnr_sessions", "s")
        return await store.take_over()

    assert asyncio.run(story()) == Records()


async def test_a_record_that_lags_behind_storage_is_caught_up(tmp_path: Path) -> None:
    """Only of a session under way: what rests was written after its last checkpoint."""
    storage = open_storage(f"file://{tmp_path}")
    assert await newest_checkpoint(storage, SESSION) is None
    scaler = CHECKPOINT.scaler
    for step in (3, 5):
        await write_manifest(storage, manifest_of(WriteManifest(SESSIONS, step, "numpy", (), scaler)))
    newest = await newest_checkpoint(storage, SESSION)
    assert newest == CheckpointRecord(5, "checkpoints/s/0000000005/manifest.json", scaler)
    resting = replace(SESSIONS, state=SessionState.DONE)
    caught = await caught_up(Records(sessions=(SESSIONS, resting)), storage)
    assert caught.sessions == (replace(SESSIONS, checkpoints=(CHECKPOINT, newest)), resting)
    assert await caught_up(caught, storage) == caught
    await storage.put("checkpoints/s/0000000007/manifest.json", b"{}")
    assert await newest_checkpoint(storage, SESSION) == newest


@pytest.mark.parametrize("value", [b"", b"\xc1", b"\x80", b"Zzz"])
def test_a_value_that_is_no_record_is_an_error_with_its_place(value: bytes) -> None:
    """Never a leader that starts from half of what was known."""

    async def story() -> None:
        bus = MemoryBroker().connect()
        await (await bus.kv("dcnr_sessions")).put("s", value)
        await (await Store.open(bus, 1)).take_over()

    with pytest.raises(PeerError, match=r"dcnr_sessions/s is not a SessionRecord"):
        asyncio.run(story())


# -- two leaders -----------------------------------------------------------------------------------------------------------


class Silent(MemoryKv):
    """A bucket that takes the next writes and removals, and does not say so; or does not even take them."""

    def __init__(self) -> None:
        super().__init__()
        self.unanswered = 0
        self.lost = 0

    def _answer(self) -> None:
        if self.unanswered:
            self.unanswered -= 1
            raise WorldError("no answer in time")

    def _arrive(self) -> None:
        if self.lost:
            self.lost -= 1
            raise WorldError("no answer in time")

    async def create(self, key: str, value: bytes) -> int:
        """As `update`."""
        self._arrive()
        revision = await super().create(key, value)
        self._answer()
        return revision

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Write, and perhaps say so."""
        self._arrive()
        revision = await super().update(key, value, revision)
        self._answer()
        return revision

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Remove, and perhaps say so."""
        self._arrive()
        await super().delete(key, revision)
        self._answer()


async def two_leaders() -> tuple[Store, Store]:
    """An old one that has written, and a new one that has taken over."""
    broker = MemoryBroker()
    old, new = await Store.open(broker.connect(), 1), await Store.open(broker.connect(), 2)
    for one in (NETWORKS, SESSIONS, ASSIGNMENTS, PNODES):
        await old.put(one)
    await new.take_over()
    return old, new


@pytest.mark.parametrize("change", [NETWORKS, SESSIONS, ASSIGNMENTS, PNODES], ids=lambda record: type(record).__name__)
async def test_an_earlier_leader_writes_nothing_over_what_a_new_one_has_touched(change: Record) -> None:
    """It finds out with its first write, and with its first removal, of any record; the new one goes on."""
    old, new = await two_leaders()
    with pytest.raises(LeaseLost, match="another orchestrator wrote"):
        await old.put(change)
    with pytest.raises(LeaseLost, match="another orchestrator wrote"):
        await old.drop(BUCKETS[type(change)], key_of(change))
    await new.put(change)
    await new.drop(BUCKETS[type(change)], key_of(change))


async def test_an_earlier_leader_does_not_bring_back_what_a_new_one_removed() -> None:
    """Neither does it take its own removal for the other's."""
    old, new = await two_leaders()
    await new.drop("dcnr_sessions", "s")
    with pytest.raises(LeaseLost):
        await old.put(SESSIONS)


async def test_what_an_earlier_leader_writes_during_a_takeover_is_taken_along() -> None:
    """Whichever comes first: the newest value is read, and the next write of the earlier one fails."""
    broker = MemoryBroker()
    old, new = await Store.open(broker.connect(), 1), await Store.open(broker.connect(), 2)
    await old.put(SESSIONS)
    await old.put(NETWORKS)
    kv = await broker.connect().kv("dcnr_sessions")
    (entry,) = await kv.entries()
    later = replace(SESSIONS, step=99)
    await old.put(later)
    assert await new._touched(SessionRecord, entry) == later
    with pytest.raises(LeaseLost):
        await old.put(SESSIONS)
    (entry,) = await (await broker.connect().kv("dcnr_networks")).entries()
    await old.drop("dcnr_networks", "small")
    assert await new._touched(NetworkRecord, entry) is None


async def test_a_write_that_got_no_answer_may_have_been_applied() -> None:
    """The next one, of the same or a newer value, finds ours and goes on from it; so does one after another that got none."""
    kv = Silent()
    store = Store({"dcnr_sessions": kv}, 1)
    later = replace(SESSIONS, step=99)
    for unanswered, lost in ((1, 0), (1, 1), (0, 1), (2, 0)):
        for newer in (SESSIONS, later):
            kv.unanswered, kv.lost = unanswered, lost
            for _ in range(unanswered + lost):
                with pytest.raises(WorldError):
                    await store.put(SESSIONS if kv.unanswered % 2 else later)
            await store.put(newer)
            (entry,) = await kv.entries()
            assert entry.value == store._value(newer)
    assert store._unanswered == {}


async def test_a_removal_that_got_no_answer_may_have_been_applied() -> None:
    """A second one finds nothing, and so does a record that is written after all."""
    kv = Silent()
    store = Store({"dcnr_sessions": kv}, 1)
    for again in ("drop", "put"):
        await store.put(SESSIONS)
        kv.unanswered = 1
        with pytest.raises(WorldError):
            await store.drop("dcnr_sessions", "s")
        if again == "drop":
            await store.drop("dcnr_sessions", "s")
            assert await kv.entries() == []
        else:
            await store.put(SESSIONS)
            assert len(await kv.entries()) == 1


async def test_a_write_of_an_earlier_leader_that_got_no_answer_is_not_taken_for_its_own_once_a_new_one_has_touched_it() -> None:
    """Although the record is the same: the earlier leader finds out when it tries again."""
    kv = Silent()
    old, new = Store({"dcnr_sessions": kv}, 1), Store({"dcnr_sessions": kv}, 2)
    kv.unanswered = 1
    with pytest.raises(WorldError):
        await old.put(SESSIONS)
    (entry,) = await kv.entries()
    assert await new._touched(SessionRecord, entry) == SESSIONS
    with pytest.raises(LeaseLost):
        await old.put(SESSIONS)
    await new.put(SESSIONS)


@pytest.mark.nats
async def test_it_is_the_same_on_a_real_server(nats_url: str) -> None:
    """Of two leaders the earlier one cannot write, remove or bring back anything."""
    bus = await connect(nats_url, "test")
    buckets: dict[Bucket, Kv] = {bucket: await bus.kv(f"store_{bucket}") for bucket in BUCKETS.values()}
    old, new = Store(buckets, 1), Store(buckets, 2)
    for one in (NETWORKS, SESSIONS, PNODES):
        await old.put(one)
    await old.put(SESSIONS)
    assert await new.take_over() == Records((NETWORKS,), (SESSIONS,), (), (PNODES,))
    with pytest.raises(LeaseLost):
        await old.put(NETWORKS)
    with pytest.raises(LeaseLost):
        await old.drop("dcnr_fleet", "a")
    await new.drop("dcnr_sessions", "s")
    with pytest.raises(LeaseLost):
        await old.put(SESSIONS)
    await new.put(SESSIONS)
    assert (await Store(buckets, 3).take_over()).sessions == (SESSIONS,)
    await bus.close()
