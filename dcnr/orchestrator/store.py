"""The buckets: records to bytes and back, and nothing else about them.

Rule 1: one record is one value; the key is its name.
Rule 2: what cannot be read is an error that names the bucket and key; a leader never starts from half of what was known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from dcnr.bus import codec
from dcnr.bus.base import Bus, Kv
from dcnr.errors import PeerError
from dcnr.orchestrator.commands import Bucket
from dcnr.orchestrator.state import AssignmentRecord, NetworkRecord, PNodeRecord, Record, Records, SessionRecord, key_of

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


def _read(cls: type[R], place: str, value: bytes) -> R:
    try:
        record: R = _READERS[cls].validate_python(codec.unpack(value))
    except (PeerError, ValidationError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        remedy = f"it was written by another version, or damaged; remove the key {place} to go on without it"
        raise PeerError(f"the value of {place} is not a {cls.__name__}: {first}", remedy) from error
    return record
