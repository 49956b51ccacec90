"""The lease: of all orchestrators of a cluster one leads.

Rule 1: the lease is one key, taken by create or compare-and-set and renewed by compare-and-set. The revision with which it was taken is the
`term`: every leader has one of its own, larger than those before.
Rule 2: a follower judges by its own clock: a revision that has not changed for `expires` seconds belongs to a dead leader. It knows at once
if that was a process of its own host that is gone, or if the lease was left free by a leader that stopped in order.
Rule 3: a leader that could not renew for `give_up` seconds stops leading, and performs nothing from then on, so that two never lead by
honest clocks.
Rule 4: where the bucket is kept on several servers, an election of theirs stops all writes for up to 9 s: then everything takes longer.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from pydantic import TypeAdapter, ValidationError

from dcnr.bus import codec
from dcnr.bus.base import BucketGone, Entry, KeyConflict, Kv
from dcnr.bus.transport import host_id
from dcnr.clock import Clock
from dcnr.errors import DcnrError, PeerError, WorldError

BUCKET = "dcnr_leader"
KEY = "leader"
LOOK_EVERY = 1.0
"""Seconds between two looks of a follower."""
RELEASE_WITHIN = 1.0
AGAIN_AFTER = 0.25
"""Seconds after which a renewal that failed is tried again: an election of the servers may end at any moment."""
LOOK_WITHIN = 0.5
"""Seconds to find out whether the bucket is gone."""
_SAME_START = 2.0
"""Seconds by which two readings of the start of one process may differ: it is reckoned from a clock that may be set."""


@dataclass(frozen=True, slots=True)
class Timing:
    """When a leader renews, when it gives up, and when a follower takes over; seconds."""

    renew: float
    give_up: float
    expires: float


ONE_SERVER = Timing(renew=1.0, give_up=4.0, expires=5.0)
SEVERAL_SERVERS = Timing(renew=2.0, give_up=12.0, expires=15.0)


class LeaseLost(DcnrError):
    """Another orchestrator leads, or the lease could not be renewed in time."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Value of the lease: the holder's id (empty: nobody), for people its clock when it was renewed, and which process it is."""

    id: str
    time: float
    host: str = ""
    pid: int = 0
    started: float = 0.0


_HOLDER = TypeAdapter(Holder)


class Lease:
    """One candidate's view of the lease. `id` is unique to this process."""

    def __init__(self, kv: Kv, id: str, clock: Clock) -> None:
        self.term = 0
        """The revision with which the lease was taken; 0 before."""
        self._kv = kv
        self._id = id
        self._clock = clock
        self._timing = ONE_SERVER if kv.replicas == 1 else SEVERAL_SERVERS
        self._revision = 0
        self._renewed_at = 0.0
        self._watched: tuple[int, float] | None = None

    async def acquire(self) -> None:
        """Wait until this candidate leads."""
        while not await self._try():
            await asyncio.sleep(LOOK_EVERY)

    async def keep(self) -> None:
        """Renew for ever; raises `LeaseLost`."""
        pause = self._timing.renew
        while True:
            await asyncio.sleep(pause)
            pause = self._timing.renew if await self._renew() else AGAIN_AFTER

    def check(self) -> None:
        """Raise `LeaseLost` if the last renewal is so long ago that another may lead soon."""
        if self._clock.now() - self._renewed_at >= self._timing.give_up:
            raise LeaseLost(f"the lease was not renewed for {self._timing.give_up:g} s")

    async def release(self) -> None:
        """Leave a free lease behind, if it is ours."""
        if not self.term:
            return
        try:
            async with asyncio.timeout(RELEASE_WITHIN):
                await self._kv.update(KEY, self._value(free=True), self._revision)
        except (KeyConflict, WorldError, TimeoutError):
            return  # it is somebody else's, or will expire

    async def _try(self) -> bool:
        asked_at = self._clock.now()
        try:
            entry = await self._kv.get(KEY)
            if entry is None:
                return self._hold(await self._kv.create(KEY, self._value()), asked_at)
            holder = _holder(entry)
            if holder.id in ("", self._id) or self._expired(entry) or gone(holder):
                return self._hold(await self._kv.update(KEY, self._value(), entry.revision), asked_at)
        except BucketGone as error:
            raise LeaseLost(f"the bucket {BUCKET} is gone") from error
        except (KeyConflict, WorldError):
            return False
        return False

    def _hold(self, revision: int, asked_at: float) -> bool:
        self.term = self._revision = revision
        self._renewed_at, self._watched = asked_at, None
        return True

    def _expired(self, entry: Entry) -> bool:
        now = self._clock.now()
        if self._watched is None or self._watched[0] != entry.revision:
            self._watched = (entry.revision, now)
        return now - self._watched[1] >= self._timing.expires

    async def _renew(self) -> bool:
        """Whether it succeeded."""
        asked_at = self._clock.now()
        try:
            async with asyncio.timeout(self._timing.renew):
                self._revision = await self._renewed()
        except (WorldError, TimeoutError) as error:
            await self._look()
            if self._clock.now() - self._renewed_at >= self._timing.give_up:
                why = str(error) or "no answer in time"
                raise LeaseLost(f"the lease could not be renewed for {self._timing.give_up:g} s: {why}") from error
            return False
        self._renewed_at = asked_at
        return True

    async def _look(self) -> None:
        """Raise `LeaseLost` if there is no bucket any more: a write only gets no answer then."""
        try:
            async with asyncio.timeout(LOOK_WITHIN):
                await self._kv.get(KEY)
        except BucketGone as error:
            raise LeaseLost(f"the bucket {BUCKET} is gone") from error
        except (WorldError, TimeoutError):
            return

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
        return codec.pack(asdict(Holder("" if free else self._id, self._clock.now(), *_this_process())))


def gone(holder: Holder) -> bool:
    """Whether `holder` was a process of this host that does not run any more."""
    host, _, _ = _this_process()
    if holder.host != host:
        return False
    try:
        process = psutil.Process(holder.pid)
        another = abs(process.create_time() - holder.started) > _SAME_START
        return bool(another or process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def _this_process() -> tuple[str, int, float]:
    """Host, pid and start. Hosts are equal where pids mean the same: containers have numbers of their own."""
    pids = Path("/proc/self/ns/pid")
    namespace = os.stat(pids).st_ino if pids.exists() else 0
    return f"{host_id()}-{namespace}", os.getpid(), psutil.Process().create_time()


def _holder(entry: Entry) -> Holder:
    try:
        return _HOLDER.validate_python(codec.unpack(entry.value))
    except ValidationError as error:
        raise PeerError(f"the value of {BUCKET}/{KEY} is not a lease", "another program writes to this bucket") from error
