"""Records in buckets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from dcnr.bus.memory import MemoryBroker
from dcnr.errors import PeerError
from dcnr.ids import Epoch, NetworkId, PNodeId
from dcnr.orchestrator.commands import WriteManifest
from dcnr.orchestrator.shell import manifest_of
from dcnr.orchestrator.state import (
    AssignmentRecord,
    CheckpointRecord,
    NetworkRecord,
    PNodeRecord,
    PNodeState,
    Record,
    Records,
    SessionState,
)
from dcnr.orchestrator.store import Store, caught_up, newest_checkpoint
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
        store = await Store.open(broker.connect())
        records: tuple[Record, ...] = (NETWORKS, SESSIONS, ASSIGNMENTS, PNODES)
        for one in records:
            await store.put(one)
            await store.put(one)
        return await (await Store.open(broker.connect())).read()

    assert asyncio.run(story()) == Records((NETWORKS,), (SESSIONS,), (ASSIGNMENTS,), (PNODES,))


def test_a_dropped_record_is_gone_and_dropping_twice_is_fine() -> None:
    """Absent is absent."""

    async def story() -> Records:
        store = await Store.open(MemoryBroker().connect())
        await store.put(SESSIONS)
        await store.drop("dcnr_sessions", "s")
        await store.drop("dcnr_sessions", "s")
        return await store.read()

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


@pytest.mark.parametrize("value", [b"", b"\xc1", b"\x80", b"Zzz"])
def test_a_value_that_is_no_record_is_an_error_with_its_place(value: bytes) -> None:
    """Never a leader that starts from half of what was known."""

    async def story() -> None:
        bus = MemoryBroker().connect()
        await (await bus.kv("dcnr_sessions")).put("s", value)
        await (await Store.open(bus)).read()

    with pytest.raises(PeerError, match=r"dcnr_sessions/s is not a SessionRecord"):
        asyncio.run(story())
