"""What waits to leave an orchestrator: messages, hops and records, within bounds however long the server is away.

Rule 1: messages and the hops to one PNode keep their order.
Rule 2: when more waits than the limit, metrics are dropped first, oldest first, then whatever is oldest: the protocol repeats what matters.
Rule 3: a record that changed twice is written once, its newest value; it is written again until the store takes it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import count

import structlog

from dcnr.errors import UserError, WorldError
from dcnr.orchestrator.commands import Bucket, SendHop
from dcnr.orchestrator.state import Record, key_of
from dcnr.orchestrator.store import BUCKETS, Place, Store

log = structlog.get_logger()

MESSAGES_LIMIT = 4 << 20
"""Bytes of messages that may wait."""
HOPS_LIMIT = 64 << 20
"""Bytes of hops to one PNode that may wait."""
RETRY_AFTER = 0.5
"""Seconds before what the store did not take is tried again."""


class Outbox:
    """Messages, each with its subject."""

    def __init__(self, limit: int = MESSAGES_LIMIT) -> None:
        self.dropped = 0
        self._limit = limit
        self._bytes = 0
        self._numbers = count()
        self._waiting: OrderedDict[int, tuple[str, bytes]] = OrderedDict()
        self._metrics: deque[int] = deque()
        self._filled = asyncio.Event()

    def put(self, subject: str, data: bytes, metric: bool = False) -> None:
        """Add one at the end."""
        number = next(self._numbers)
        self._waiting[number] = (subject, data)
        self._bytes += len(data)
        if metric:
            self._metrics.append(number)
        while self._bytes > self._limit and len(self._waiting) > 1:
            self._take(self._metrics[0] if self._metrics else next(iter(self._waiting)))
            self.dropped += 1
        self._filled.set()

    async def get(self) -> tuple[str, bytes]:
        """The oldest, once there is one."""
        await self._filled.wait()
        taken = self._take(next(iter(self._waiting)))
        if not self._waiting:
            self._filled.clear()
        return taken

    def _take(self, number: int) -> tuple[str, bytes]:
        if self._metrics and self._metrics[0] == number:
            self._metrics.popleft()
        taken = self._waiting.pop(number)
        self._bytes -= len(taken[1])
        return taken


class Hops:
    """Hops to one PNode."""

    def __init__(self, limit: int = HOPS_LIMIT) -> None:
        self.dropped = 0
        self._limit = limit
        self._bytes = 0
        self._waiting: deque[SendHop] = deque()
        self._filled = asyncio.Event()

    def put(self, hop: SendHop) -> None:
        """Add one at the end."""
        self._waiting.append(hop)
        self._bytes += hop.payload.nbytes
        while self._bytes > self._limit and len(self._waiting) > 1:
            self._take()
            self.dropped += 1
        self._filled.set()

    async def get(self) -> SendHop:
        """The oldest, once there is one."""
        await self._filled.wait()
        taken = self._take()
        if not self._waiting:
            self._filled.clear()
        return taken

    def _take(self) -> SendHop:
        taken = self._waiting.popleft()
        self._bytes -= taken.payload.nbytes
        return taken


class RecordWriter:
    """Writes records behind the machine's back, in the order of their first change. `check` raises when we may write no more."""

    def __init__(self, store: Store, check: Callable[[], None]) -> None:
        self._store = store
        self._check = check
        self._waiting: dict[Place, Record | None] = {}
        self._filled = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._given_up = False

    def put(self, record: Record) -> None:
        """Have `record` written."""
        self._add((BUCKETS[type(record)], key_of(record)), record)

    def drop(self, bucket: Bucket, key: str) -> None:
        """Have a record removed."""
        self._add((bucket, key), None)

    async def settled(self) -> None:
        """Wait until everything is written. Raises `WorldError` if it never will be."""
        await self._idle.wait()
        if self._given_up:
            raise WorldError("this orchestrator stopped before everything was written", "ask again")

    def give_up(self) -> None:
        """Nothing is written any more."""
        self._given_up = not self._idle.is_set()
        self._idle.set()

    async def run(self) -> None:
        """Write until cancelled. Raises `LeaseLost` when another leads."""
        while True:
            await self._filled.wait()
            while self._waiting:
                place = next(iter(self._waiting))
                await self._write(place, self._waiting.pop(place))
            self._filled.clear()
            self._idle.set()

    def _add(self, place: Place, record: Record | None) -> None:
        self._waiting[place] = record
        self._filled.set()
        self._idle.clear()

    async def _write(self, place: Place, record: Record | None) -> None:
        while True:
            self._check()
            try:
                await (self._store.drop(*place) if record is None else self._store.put(record))
            except WorldError as error:
                log.warning("could not write a record, trying again", bucket=place[0], key=place[1], reason=str(error))
                await asyncio.sleep(RETRY_AFTER)
                record = self._waiting.pop(place, record)
            except UserError as error:
                log.error("a record cannot be written", bucket=place[0], key=place[1], reason=str(error))
                return
            else:
                return
