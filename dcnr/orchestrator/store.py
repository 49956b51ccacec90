"""What is remembered: records in buckets, and the checkpoints that storage has.

Rule 1: one record is one value; the key is its name.
Rule 2: what cannot be read is an error that names the bucket and key; a leader never starts from half of what was known.
Rule 3: a leader writes over exactly what it last saw, and begins by touching every record: what an earlier leader writes after that fails.
A write that got no answer may have been applied: what is found then is ours if we sent it. Every value holds the term of its leader, so
that no two leaders ever send the same.
Rule 4: a checkpoint is what its manifest in storage says; a record may lag behind, if an orchestrator was killed between the two.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import structlog
from pydantic import TypeAdapter, ValidationError

from dcnr.bus import codec
from dcnr.bus.base import Bus, Entry, KeyConflict, Kv
from dcnr.errors import DcnrError, PeerError
from dcnr.ids import SessionId
from dcnr.orchestrator.commands import Bucket
from dcnr.orchestrator.leader import LeaseLost
from dcnr.orchestrator.state import (
    UNDER_WAY,
    AssignmentRecord,
    CheckpointRecord,
    NetworkRecord,
    PNodeRecord,
    Record,
    Records,
    SessionRecord,
    key_of,
)
from dcnr.orchestrator.trainer import scaler_fields
from dcnr.storage.base import Storage
from dcnr.storage.checkpoint import DAMAGED, manifest_keys, read_manifest_at

Place = tuple[Bucket, str]
"""A bucket and a key."""
log = structlog.get_logger()

R = TypeVar("R", NetworkRecord, SessionRecord, AssignmentRecord, PNodeRecord)

BUCKETS: Mapping[type[Record], Bucket] = {
    NetworkRecord: "dcnr_networks",
    SessionRecord: "dcnr_sessions",
    AssignmentRecord: "dcnr_assignments",
    PNodeRecord: "dcnr_fleet",
}
_READERS: Mapping[type[Record], TypeAdapter[Any]] = {cls: TypeAdapter(cls) for cls in BUCKETS}


class Store:
    """The four buckets of a cluster, open, as one leader sees them. Nothing of it may run twice at the same time."""

    def __init__(self, buckets: Mapping[Bucket, Kv], term: int) -> None:
        self._buckets = buckets
        self._term = term
        self._revisions: dict[Place, int] = {}
        self._unanswered: dict[Place, set[bytes | None]] = {}
        """What was sent to a place and may have been written; None for a removal."""

    @classmethod
    async def open(cls, bus: Bus, term: int) -> Store:
        """Open the buckets, made if they are not there."""
        return cls({bucket: await bus.kv(bucket) for bucket in BUCKETS.values()}, term)

    async def take_over(self) -> Records:
        """Everything, touched. Raises `PeerError` that names a value that is not a record."""
        return Records(
            tuple(await self._all(NetworkRecord)),
            tuple(await self._all(SessionRecord)),
            tuple(await self._all(AssignmentRecord)),
            tuple(await self._all(PNodeRecord)),
        )

    async def put(self, record: Record) -> None:
        """Write a record over the old one. Raises `LeaseLost` if another leader wrote it, and `WorldError` if there was no answer."""
        place, data = (BUCKETS[type(record)], key_of(record)), self._value(record)
        self._unanswered.setdefault(place, set()).add(data)
        while True:
            try:
                self._revisions[place] = await self._write(place, data)
                break
            except KeyConflict:
                found = await self._own(place)
                if found is not None and found.value == data:
                    break
        del self._unanswered[place]

    async def drop(self, bucket: Bucket, key: str) -> None:
        """Remove a record. Raises as `put`."""
        place = (bucket, key)
        self._unanswered.setdefault(place, set()).add(None)
        while place in self._revisions or await self._own(place) is not None:
            try:
                await self._buckets[bucket].delete(key, self._revisions[place])
                break
            except KeyConflict:
                await self._own(place)
        self._revisions.pop(place, None)
        del self._unanswered[place]

    async def _write(self, place: Place, data: bytes) -> int:
        kv, revision = self._buckets[place[0]], self._revisions.get(place)
        return await (kv.create(place[1], data) if revision is None else kv.update(place[1], data, revision))

    async def _own(self, place: Place) -> Entry | None:
        """What is there instead of what we last saw. Raises `LeaseLost` unless it is a write of ours that had no answer."""
        found = await self._buckets[place[0]].get(place[1])
        if (None if found is None else found.value) not in self._unanswered[place]:
            raise LeaseLost(f"another orchestrator wrote {place[0]}/{place[1]}")
        if found is not None:
            self._revisions[place] = found.revision
        else:
            self._revisions.pop(place, None)
        return found

    async def _all(self, cls: type[R]) -> list[R]:
        bucket = BUCKETS[cls]
        found = await asyncio.gather(*(self._touched(cls, entry) for entry in await self._buckets[bucket].entries()))
        return [record for record in found if record is not None]

    async def _touched(self, cls: type[R], entry: Entry | None) -> R | None:
        """The newest value, written as one of ours; None if it was removed meanwhile."""
        bucket = BUCKETS[cls]
        while entry is not None:
            record = _read(cls, f"{bucket}/{entry.key}", entry.value)
            try:
                self._revisions[bucket, entry.key] = await self._buckets[bucket].update(entry.key, self._value(record), entry.revision)
            except KeyConflict:
                entry = await self._buckets[bucket].get(entry.key)
            else:
                return record
        return None

    def _value(self, record: Record) -> bytes:
        return codec.pack({**dataclasses.asdict(record), "term": self._term})


async def newest_checkpoint(storage: Storage, session: SessionId) -> CheckpointRecord | None:
    """The newest checkpoint of a session whose manifest can be read: whoever reads its parts finds out if they are damaged."""
    for key in reversed(await manifest_keys(storage, session)):
        try:
            manifest = await read_manifest_at(storage, key)
        except DAMAGED as error:
            log.error("goes back to an older checkpoint", session=session, reason=str(error))
        else:
            return CheckpointRecord(manifest.step, manifest.key, scaler_fields(manifest.state))
    return None


async def caught_up(records: Records, storage: Storage) -> Records:
    """The records, with the checkpoints that were complete before they could be written into the records of sessions under way."""
    return replace(records, sessions=tuple([await _with_newest(record, storage) for record in records.sessions]))


async def _with_newest(record: SessionRecord, storage: Storage) -> SessionRecord:
    try:
        found = await newest_checkpoint(storage, record.session) if record.state in UNDER_WAY else None
    except DcnrError as error:  # PNodes may have all that it takes to go on
        log.warning("goes on without looking for newer checkpoints", session=record.session, reason=str(error))
        return record
    known = record.newest.step if record.newest else -1
    return replace(record, checkpoints=(*record.checkpoints, found)) if found and found.step > known else record


def _read(cls: type[R], place: str, value: bytes) -> R:
    try:
        record: R = _READERS[cls].validate_python(codec.unpack(value))
    except (PeerError, ValidationError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        remedy = f"it was written by another version, or damaged; remove the key {place} to go on without it"
        raise PeerError(f"the value of {place} is not a {cls.__name__}: {first}", remedy) from error
    return record
