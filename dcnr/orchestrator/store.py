"""What is remembered: records in buckets, and the checkpoints that storage has.

Rule 1: one record is one value; the key is its name.
Rule 2: what cannot be read is an error that names the bucket and key; a leader never starts from half of what was known.
Rule 3: a checkpoint is what its manifest in storage says; a record may lag behind, if an orchestrator was killed between the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from dcnr.bus import codec
from dcnr.bus.base import Bus, Kv
from dcnr.errors import NotFound, PeerError
from dcnr.ids import SessionId
from dcnr.orchestrator.commands import Bucket
from dcnr.orchestrator.state import (
    ACTIVE,
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
from dcnr.storage.checkpoint import read_manifest

R = TypeVar("R", NetworkRecord, SessionRecord, AssignmentRecord, PNodeRecord)

BUCKETS: Mapping[type[Record], Bucket] = {
    NetworkRecord: "dcnr_networks",
    SessionRecord: "dcnr_sessions",
    AssignmentRecord: "dcnr_assignments",
    PNodeRecord: "dcnr_fleet",
}
_READERS: Mapping[type[Record], TypeAdapter[Any]] = {cls: TypeAdapter(cls) for cls in BUCKETS}


class Store:
    """The four buckets of a cluster, open."""

    def __init__(self, buckets: Mapping[Bucket, Kv]) -> None:
        self._buckets = buckets

    @classmethod
    async def open(cls, bus: Bus) -> Store:
        """Open the buckets, made if they are not there."""
        return cls({bucket: await bus.kv(bucket) for bucket in BUCKETS.values()})

    async def read(self) -> Records:
        """Everything. Raises `PeerError` that names a value that is not a record."""
        return Records(
            tuple(await self._all(NetworkRecord)),
            tuple(await self._all(SessionRecord)),
            tuple(await self._all(AssignmentRecord)),
            tuple(await self._all(PNodeRecord)),
        )

    async def put(self, record: Record) -> None:
        """Write a record over the old one."""
        await self._buckets[BUCKETS[type(record)]].put(key_of(record), codec.pack(dataclasses.asdict(record)))

    async def drop(self, bucket: Bucket, key: str) -> None:
        """Remove a record."""
        await self._buckets[bucket].delete(key)

    async def _all(self, cls: type[R]) -> list[R]:
        bucket = BUCKETS[cls]
        return [_read(cls, f"{bucket}/{entry.key}", entry.value) for entry in await self._buckets[bucket].entries()]


async def newest_checkpoint(storage: Storage, session: SessionId) -> CheckpointRecord | None:
    """The newest complete checkpoint of a session. Raises `PeerError` if its manifest is damaged."""
    try:
        manifest = await read_manifest(storage, session)
    except NotFound:
        return None
    return CheckpointRecord(manifest.step, manifest.key, scaler_fields(manifest.state))


async def caught_up(records: Records, storage: Storage) -> Records:
    """The records, with the checkpoints that were complete before they could be written into the records of sessions under way."""
    return replace(records, sessions=tuple([await _with_newest(record, storage) for record in records.sessions]))


async def _with_newest(record: SessionRecord, storage: Storage) -> SessionRecord:
    found = await newest_checkpoint(storage, record.session) if record.state in ACTIVE else None
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
