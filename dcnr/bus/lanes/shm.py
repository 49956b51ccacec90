"""The lane between processes of one host: the sender copies into a ring of shared memory, the receiver copies out.

- One ring per receiver, made by the sender at first use and made anew, larger, when a tensor does not fit twice.
- `Hop.lane` is `shm:<segment>:<offset>`. Credits give slots back; a header without credit is sent again.
- A slot begins with the number of its transfer, read before and after the copy, so a late header never delivers another tensor's bytes.
- Where shared memory has no room, or the receiver cannot open it, this lane is given up for that receiver with a line in the log.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import structlog

from dcnr.bus.credit import key
from dcnr.bus.lanes import segment
from dcnr.bus.lanes.base import PATIENCE, REFUSED, TRIES, Bytes, LaneBroken, Port, resolve
from dcnr.bus.lanes.pool import Pool
from dcnr.bus.lanes.ring import Ring
from dcnr.bus.lanes.segment import Segment
from dcnr.bus.messages import Credit, Hop
from dcnr.errors import PeerError, WorldError
from dcnr.ids import PNodeId

SHM_FROM = 64 << 10
"""Below, a message is as fast and needs no credit."""
MIN_RING = 4 << 20
_GRAIN = 1 << 20
_SLOT_HEADER = 64
_NUMBER = struct.Struct("<q")
_NOBODY = 0

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(slots=True)
class _Outbox:
    """The ring to one receiver."""

    segment: Segment
    ring: Ring
    freed: asyncio.Event = field(default_factory=asyncio.Event)

    def write(self, start: int, transfer: int, data: Bytes) -> None:
        _NUMBER.pack_into(self.segment.memory, start, transfer)
        np.frombuffer(self.segment.memory, np.uint8, len(data), start + _SLOT_HEADER)[:] = data

    def free(self, start: int) -> None:
        _NUMBER.pack_into(self.segment.memory, start, _NOBODY)
        self.ring.release(start)
        self.freed.set()


@dataclass(slots=True)
class _Transfer:
    to: PNodeId
    credited: asyncio.Event
    refused: bool = False


class ShmLane:
    """Shared memory to peers with our own `host`."""

    name: ClassVar[str] = "shm"

    def __init__(self, port: Port, pool: Pool, host: str, patience: float = PATIENCE) -> None:
        self._port = port
        self._pool = pool
        self._host = host
        self._patience = patience
        self._hosts: Mapping[PNodeId, str] = {}
        self._given_up: set[PNodeId] = set()
        self._outboxes: dict[PNodeId, _Outbox] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._inboxes: dict[PNodeId, Segment] = {}

    async def start(self) -> None:
        """Remove what killed processes left behind."""
        segment.sweep()

    def set_hosts(self, hosts: Mapping[PNodeId, str]) -> None:
        """Where the peers are."""
        self._hosts = hosts

    def serves(self, to: PNodeId, nbytes: int) -> bool:
        """Tensors worth it, to our own host."""
        return nbytes >= SHM_FROM and self.reaches(to)

    def reaches(self, to: PNodeId) -> bool:
        """Whether we seem to share memory."""
        return self._hosts.get(to) == self._host and to not in self._given_up

    async def send(self, to: PNodeId, hop: Hop, data: Bytes) -> asyncio.Future[None]:
        """Copy into the ring, waiting for room, and publish the header."""
        outbox, start = await self._reserve(to, len(data) + _SLOT_HEADER)
        outbox.write(start, hop.transfer, data)
        hop = replace(hop, lane=f"{self.name}:{outbox.segment.name}:{start}")
        self._transfers[hop.transfer] = _Transfer(to, asyncio.Event())
        announced: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A task of its own: the slot must be looked after even if the sender gives up.
        self._port.start(self._see_through(outbox, start, hop, announced, arrived))
        await announced
        return arrived

    def on_header(self, hop: Hop, payload: memoryview) -> None:
        """Copy out, deliver, acknowledge."""
        if key(hop) in self._port.seen:
            self._port.acknowledge(hop.sender, hop.transfer, hop.nbytes)
            return
        name, start = _place(hop)
        try:
            memory = self._inbox(hop.sender, name).memory
        except OSError as error:
            _log.warning("shared memory cannot be opened; chunks instead", pnode=self._port.me, peer=hop.sender, error=str(error))
            self._port.acknowledge(hop.sender, hop.transfer, REFUSED)
            return
        if start < 0 or start + _SLOT_HEADER + hop.nbytes > len(memory):
            raise PeerError(f"hop: no {hop.nbytes} bytes at {start} of a segment of {len(memory)}")
        data = self._pool.take(hop.nbytes)
        before = _NUMBER.unpack_from(memory, start)[0]
        data[:] = np.frombuffer(memory, np.uint8, hop.nbytes, start + _SLOT_HEADER)
        if not before == hop.transfer == _NUMBER.unpack_from(memory, start)[0]:
            raise PeerError("hop: its shared memory holds another tensor by now")
        self._port.seen.add(key(hop))
        self._port.deliver(hop, data)
        self._port.acknowledge(hop.sender, hop.transfer, hop.nbytes)

    def on_credit(self, credit: Credit) -> None:
        """The receiver has copied a slot, or cannot."""
        transfer = self._transfers.get(credit.transfer)
        if transfer is not None and transfer.to == credit.receiver:
            transfer.refused = credit.received == REFUSED
            transfer.credited.set()

    async def close(self) -> None:
        """Unmap and remove. The port has ended the tasks."""
        for outbox in self._outboxes.values():
            outbox.segment.close()
        for inbox in self._inboxes.values():
            inbox.close()
        self._outboxes.clear()
        self._inboxes.clear()

    # -- sending ---------------------------------------------------------------------------------------------------------

    async def _reserve(self, to: PNodeId, need: int) -> tuple[_Outbox, int]:
        outbox = self._outboxes.get(to)
        if outbox is None or 2 * need > outbox.ring.size:
            outbox = await self._renew(to, need)
        self._port.check_open()
        while (start := outbox.ring.reserve(need)) is None:
            await self._freed(outbox)
        return outbox, start

    async def _freed(self, outbox: _Outbox) -> None:
        outbox.freed.clear()
        await outbox.freed.wait()
        self._port.check_open()

    async def _renew(self, to: PNodeId, need: int) -> _Outbox:
        """A ring with room for two such tensors, once the old one is idle."""
        old = self._outboxes.get(to)
        while old is not None and len(old.ring):
            await self._freed(old)
        size = max(MIN_RING, -(-2 * need // _GRAIN) * _GRAIN)
        try:
            made = await asyncio.to_thread(segment.create, size)
        except OSError as error:
            raise self._broken(to, f"no shared memory: {error}") from error
        if old is not None:
            old.segment.close()
        outbox = self._outboxes[to] = _Outbox(made, Ring(size))
        return outbox

    async def _see_through(
        self, outbox: _Outbox, start: int, hop: Hop, announced: asyncio.Future[None], arrived: asyncio.Future[None]
    ) -> None:
        """Announce until there is a credit."""
        transfer = self._transfers[hop.transfer]
        outcome: Exception | None = WorldError(f"a tensor on its way to {transfer.to} was given up")
        try:
            outcome = await self._announce(hop, transfer, announced)
        finally:
            del self._transfers[hop.transfer]
            outbox.free(start)
            resolve(announced)
            resolve(arrived, outcome)

    async def _announce(self, hop: Hop, transfer: _Transfer, announced: asyncio.Future[None]) -> Exception | None:
        for _ in range(TRIES + 1):
            try:
                await self._port.publish(hop)
            except WorldError as error:  # no connection; the next round tries again
                _log.debug("header not sent", to=transfer.to, error=str(error))
            resolve(announced)
            try:
                async with asyncio.timeout(self._patience):
                    await transfer.credited.wait()
            except TimeoutError:
                continue
            return self._broken(transfer.to, "the peer cannot open our shared memory") if transfer.refused else None
        return WorldError(f"{transfer.to} does not take tensors", "is it alive? see: dcnr pnode list")

    def _broken(self, to: PNodeId, why: str) -> LaneBroken:
        self._given_up.add(to)
        return LaneBroken(why)

    # -- receiving -------------------------------------------------------------------------------------------------------

    def _inbox(self, sender: PNodeId, name: str) -> Segment:
        """The sender's ring, attached once. A new name replaces the old ring, which is idle by then."""
        known = self._inboxes.get(sender)
        if known is not None and known.name == name:
            return known
        try:
            fresh = segment.attach(name)
        except ValueError as error:
            raise PeerError(f"hop: {error}") from error
        if known is not None:
            known.close()
        self._inboxes[sender] = fresh
        return fresh


def _place(hop: Hop) -> tuple[str, int]:
    """Segment and offset in `Hop.lane`."""
    match hop.lane.split(":"):
        case ["shm", name, start] if start.isdecimal():
            return name, int(start)
        case _:
            raise PeerError(f"hop: lane '{hop.lane[:64]}' names no place")
