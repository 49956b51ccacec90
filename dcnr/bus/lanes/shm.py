"""The lane between processes of one host, through shared memory.

- Large tensors have a segment each, which the receiver uses where it lies (`lending`). `Hop.lane` is `shm:<segment>`.
- Others, and those for which there is nothing left to lend, go through a ring, from which the receiver copies: one per receiver, made by
  the sender at first use and made anew, larger, when a tensor does not fit twice. `Hop.lane` is `shm:<segment>:<offset>`.
- Credits say that a tensor was taken and give slots of the ring back; a header without credit is sent again.
- A peer that is gone takes the memory for it along, and what it had lent us. What it owned itself is removed by whoever sees its end.
- A slot begins with the number of its transfer, read before and after the copy, so a late header never delivers another tensor's bytes.
- Where shared memory has no room, or the receiver cannot open it, this lane is given up for that receiver with a line in the log.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import structlog

from dcnr.bus.credit import key
from dcnr.bus.lanes import lending, segment
from dcnr.bus.lanes.announce import Announcements
from dcnr.bus.lanes.base import REFUSED, Bytes, LaneBroken, Port, gone
from dcnr.bus.lanes.lending import CONTROL, LEND_FROM, Shelf
from dcnr.bus.lanes.pool import Pool
from dcnr.bus.lanes.ring import Ring
from dcnr.bus.lanes.segment import Segment
from dcnr.bus.messages import Credit, Hop
from dcnr.bus.pace import PATIENCE
from dcnr.errors import PeerError, WorldError
from dcnr.ids import PNodeId

SHM_FROM = 64 << 10
"""Below, a message is as fast and needs no credit."""
MIN_RING = 4 << 20
_GRAIN = 1 << 20
_SLOT_HEADER = 64
_NUMBER = struct.Struct("<q")
_NOBODY = 0

_Settle = Callable[[bool], None]

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(slots=True)
class _Outbox:
    """The ring to one receiver."""

    segment: Segment
    ring: Ring
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False

    def write(self, start: int, transfer: int, data: Bytes) -> None:
        _NUMBER.pack_into(self.segment.memory, start, transfer)
        np.frombuffer(self.segment.memory, np.uint8, len(data), start + _SLOT_HEADER)[:] = data

    def free(self, start: int) -> None:
        if not self.closed:
            _NUMBER.pack_into(self.segment.memory, start, _NOBODY)
            self.ring.release(start)
        self.freed.set()

    def close(self) -> None:
        """Whoever waits for room learns it."""
        self.closed = True
        self.segment.close()
        self.freed.set()


class ShmLane:
    """Shared memory to peers with our own `host`."""

    name: ClassVar[str] = "shm"

    def __init__(self, port: Port, pool: Pool, host: str, patience: float = PATIENCE) -> None:
        self._port = port
        self._pool = pool
        self._host = host
        self._hosts: Mapping[PNodeId, str] = {}
        self._given_up: set[PNodeId] = set()
        self._shelves: dict[PNodeId, Shelf] = {}
        self._outboxes: dict[PNodeId, _Outbox] = {}
        self._announcements = Announcements(port, patience)
        self._inboxes: dict[PNodeId, Segment] = {}
        self._borrowed: dict[PNodeId, dict[str, Segment]] = {}

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
        """Copy into a segment or the ring, waiting for room, and publish the header."""
        used, place, settle = await self._put(to, hop.transfer, data)
        hop = replace(hop, lane=f"{self.name}:{used.name}{place}")
        return await self._announcements.send(to, hop, settle, lambda: self._refusal(to, used))

    def on_header(self, hop: Hop, payload: memoryview) -> None:
        """Borrow or copy out, deliver, acknowledge."""
        if key(hop) in self._port.seen:
            self._port.acknowledge(hop.sender, hop.transfer, hop.nbytes)
            return
        name, start = _place(hop)
        try:
            data = self._borrow(hop, name) if start is None else self._copy_out(hop, name, start)
        except OSError as error:
            _log.warning("shared memory cannot be opened", pnode=self._port.me, peer=hop.sender, error=str(error))
            self._port.acknowledge(hop.sender, hop.transfer, REFUSED)
            return
        except ValueError as error:
            raise PeerError(f"hop: {error}") from error
        self._port.seen.add(key(hop))
        self._port.deliver(hop, data)
        self._port.acknowledge(hop.sender, hop.transfer, hop.nbytes)

    def on_credit(self, credit: Credit) -> None:
        """The receiver has taken a tensor, or cannot."""
        self._announcements.credit(credit)

    def release(self, peer: PNodeId) -> None:
        """Nobody reads what lies here for it, and what it owned is of no use: if it was killed, nobody else removes that."""
        self._announcements.release(peer)
        self._given_up.discard(peer)
        self._unmap(peer)
        self._unmap_gone()
        self._port.start(asyncio.to_thread(segment.sweep))

    def _unmap_gone(self) -> None:
        """A late header may have mapped what its sender has let go of since."""
        for sender, known in tuple(self._borrowed.items()):
            self._borrowed[sender] = {name: one for name, one in known.items() if one.exists}
            if not self._borrowed[sender]:
                del self._borrowed[sender]
        for sender in [sender for sender, inbox in self._inboxes.items() if not inbox.exists]:
            self._inboxes.pop(sender).close()

    async def close(self) -> None:
        """Unmap and remove. The port has ended the tasks."""
        for peer in {*self._outboxes, *self._inboxes, *self._shelves, *self._borrowed}:
            self._unmap(peer)

    def _unmap(self, peer: PNodeId) -> None:
        if (shelf := self._shelves.pop(peer, None)) is not None:
            shelf.close()
        if (outbox := self._outboxes.pop(peer, None)) is not None:
            outbox.close()
        if (inbox := self._inboxes.pop(peer, None)) is not None:
            inbox.close()
        self._borrowed.pop(peer, None)  # unmapped when the last array over it is gone

    # -- sending ---------------------------------------------------------------------------------------------------------

    async def _put(self, to: PNodeId, transfer: int, data: Bytes) -> tuple[Segment, str, _Settle]:
        """Copy; returns the place, and what is to be done when the receiver has taken it or (False) nobody knows."""
        lent = await self._free_segment(to, len(data)) if len(data) >= LEND_FROM else None
        self._port.check_open()
        if lent is not None:
            found, shelf = lent
            lending.lend(found, transfer, data)
            return found, "", lambda taken: None if taken else shelf.discard(found)
        outbox, start = await self._reserve(to, len(data) + _SLOT_HEADER)
        outbox.write(start, transfer, data)
        return outbox.segment, f":{start}", lambda taken: outbox.free(start)

    async def _free_segment(self, to: PNodeId, nbytes: int) -> tuple[Segment, Shelf] | None:
        """One to lend, and where it belongs; None if there is none and none can be made."""
        shelf = self._shelves.setdefault(to, Shelf())
        found = shelf.find(nbytes)
        if found is None and shelf.has_room(nbytes):
            try:
                found = await self._make(lending.size_for(nbytes), lending.SPARE)
            except OSError as error:
                _log.debug("nothing to lend", pnode=self._port.me, peer=to, error=str(error))
            else:
                if self._shelves.get(to) is not shelf:
                    found.close()
                    raise gone(to)
                shelf.add(found)
        return None if found is None else (found, shelf)

    async def _reserve(self, to: PNodeId, need: int) -> tuple[_Outbox, int]:
        outbox = self._outboxes.get(to)
        if outbox is None or 2 * need > outbox.ring.size:
            outbox = await self._renew(to, need)
        self._port.check_open()
        while (start := outbox.ring.reserve(need)) is None:
            await self._freed(to, outbox)
        return outbox, start

    async def _freed(self, to: PNodeId, outbox: _Outbox) -> None:
        outbox.freed.clear()
        await outbox.freed.wait()
        self._port.check_open()
        if outbox.closed:
            raise gone(to)

    async def _renew(self, to: PNodeId, need: int) -> _Outbox:
        """A ring with room for two such tensors, once the old one is idle."""
        old = self._outboxes.get(to)
        while old is not None and len(old.ring):
            await self._freed(to, old)
        size = max(MIN_RING, -(-2 * need // _GRAIN) * _GRAIN)
        try:
            made = await self._make(size, segment.SHARE)
        except OSError as error:
            raise self._broken(to, f"no shared memory: {error}") from error
        if old is not None:
            old.close()
        outbox = self._outboxes[to] = _Outbox(made, Ring(size))
        return outbox

    async def _make(self, size: int, share: int) -> Segment:
        """Create a segment on a thread; nothing is left behind if nobody waits for it any more."""
        making = asyncio.ensure_future(asyncio.to_thread(segment.create, size, share))
        try:
            made = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(lambda done: None if done.cancelled() or done.exception() else done.result().close())
            raise
        try:
            self._port.check_open()
        except WorldError:
            made.close()
            raise
        return made

    def _refusal(self, to: PNodeId, used: Segment) -> LaneBroken:
        if used.exists:
            return self._broken(to, "the peer cannot open our shared memory")
        return LaneBroken(f"the memory that {to} was to read was let go")

    def _broken(self, to: PNodeId, why: str) -> LaneBroken:
        self._given_up.add(to)
        return LaneBroken(why)

    # -- receiving -------------------------------------------------------------------------------------------------------

    def _borrow(self, hop: Hop, name: str) -> Bytes:
        known = self._borrowed.setdefault(hop.sender, {})
        if name not in known:
            for other in [other for other in known.values() if not other.exists]:
                del known[other.name]  # unmapped when the last array over it is gone
            known[name] = segment.attach(name, CONTROL)
        return lending.borrow(known[name], hop.transfer, hop.nbytes)

    def _copy_out(self, hop: Hop, name: str, start: int) -> Bytes:
        memory = self._inbox(hop.sender, name).memory
        if start < 0 or start + _SLOT_HEADER + hop.nbytes > len(memory):
            raise PeerError(f"hop: no {hop.nbytes} bytes at {start} of a segment of {len(memory)}")
        data = self._pool.take(hop.nbytes)
        before = _NUMBER.unpack_from(memory, start)[0]
        data[:] = np.frombuffer(memory, np.uint8, hop.nbytes, start + _SLOT_HEADER)
        if not before == hop.transfer == _NUMBER.unpack_from(memory, start)[0]:
            raise PeerError("hop: its shared memory holds another tensor by now")
        return data

    def _inbox(self, sender: PNodeId, name: str) -> Segment:
        """The sender's ring, attached once. A new name replaces the old ring, which is idle by then."""
        known = self._inboxes.get(sender)
        if known is not None and known.name == name:
            return known
        fresh = segment.attach(name)
        if known is not None:
            known.close()
        self._inboxes[sender] = fresh
        return fresh


def _place(hop: Hop) -> tuple[str, int | None]:
    """Segment and offset in `Hop.lane`; None where the whole segment is lent."""
    match hop.lane.split(":"):
        case ["shm", name]:
            return name, None
        case ["shm", name, start] if start.isdecimal():
            return name, int(start)
        case _:
            raise PeerError(f"hop: lane '{hop.lane[:64]}' names no place")
