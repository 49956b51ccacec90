"""The lease: of all orchestrators of a cluster one leads.

Rule 1: the lease is one key, taken by create or compare-and-set and renewed every second; its revision is the fencing token.
Rule 2: a follower judges by its own clock: a revision that has not changed for 5 s belongs to a dead leader.
Rule 3: a leader that could not renew for 4 s stops leading, so that two never lead by honest clocks.
Rule 4: a leader that stops in order leaves a free lease behind, and the next one leads at once.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter, ValidationError

from dcnr.bus import codec
from dcnr.bus.base import Entry, KeyConflict, Kv
from dcnr.clock import Clock
from dcnr.errors import DcnrError, PeerError, WorldError

BUCKET = "dcnr_leader"
KEY = "leader"
RENEW_EVERY = 1.0
GIVE_UP_AFTER = 4.0
EXPIRES_AFTER = 5.0
RELEASE_WITHIN = 1.0


class LeaseLost(DcnrError):
    """Another orchestrator leads, or the lease could not be renewed in time."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Value of the lease: the holder's id (empty: nobody) and, for people, its clock when it was renewed."""

    id: str
    time: float


_HOLDER = TypeAdapter(Holder)


class Lease:
    """One candidate's view of the lease. `id` is unique to this process."""

    def __init__(self, kv: Kv, id: str, clock: Clock) -> None:
        self._kv = kv
        self._id = id
        self._clock = clock
        self._revision = 0
        self._renewed_at = 0.0
        self._watched: tuple[int, float] | None = None

    async def acquire(self) -> None:
        """Wait until this candidate leads."""
        while not await self._try():
            await asyncio.sleep(RENEW_EVERY)

    async def keep(self) -> None:
        """Renew for ever; raises `LeaseLost`."""
        while True:
            await asyncio.sleep(RENEW_EVERY)
            await self._renew()

    async def release(self) -> None:
        """Leave a free lease behind, if it is still ours."""
        try:
            async with asyncio.timeout(RELEASE_WITHIN):
                await self._kv.update(KEY, self._value(free=True), self._revision)
        except (KeyConflict, WorldError, TimeoutError):
            return  # it is somebody else's, or will expire

    async def _try(self) -> bool:
        try:
            entry = await self._kv.get(KEY)
            if entry is None:
                return self._hold(await self._kv.create(KEY, self._value()))
            if _holder(entry).id in ("", self._id) or self._expired(entry):
                return self._hold(await self._kv.update(KEY, self._value(), entry.revision))
        except (KeyConflict, WorldError):
            return False
        return False

    def _hold(self, revision: int) -> bool:
        self._revision, self._renewed_at, self._watched = revision, self._clock.now(), None
        return True

    def _expired(self, entry: Entry) -> bool:
        now = self._clock.now()
        if self._watched is None or self._watched[0] != entry.revision:
            self._watched = (entry.revision, now)
        return now - self._watched[1] >= EXPIRES_AFTER

    async def _renew(self) -> None:
        asked_at = self._clock.now()
        try:
            self._revision = await self._renewed()
            self._renewed_at = asked_at
        except WorldError as error:
            if self._clock.now() - self._renewed_at >= GIVE_UP_AFTER:
                raise LeaseLost(f"the lease could not be renewed for {GIVE_UP_AFTER:g} s: {error.message}") from error

    async def _renewed(self) -> int:
        """The revision of a renewal. One that timed out earlier may have been applied all the same: then the newest value is ours."""
        try:
            return await self._kv.update(KEY, self._value(), self._revision)
        except KeyConflict as conflict:
            entry = await self._kv.get(KEY)
            if entry is None or _holder(entry).id != self._id:
                raise LeaseLost("another orchestrator leads now") from conflict
            return entry.revision

    def _value(self, free: bool = False) -> bytes:
        return codec.pack(asdict(Holder("" if free else self._id, self._clock.now())))


def _holder(entry: Entry) -> Holder:
    try:
        return _HOLDER.validate_python(codec.unpack(entry.value))
    except ValidationError as error:
        raise PeerError(f"the value of {BUCKET}/{KEY} is not a lease", "another program writes to this bucket") from error
