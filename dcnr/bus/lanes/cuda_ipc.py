"""The lane between processes of one host that both have a GPU: from device to device, never through host memory.

- The sender copies a tensor into memory of its own that others may open (a ring per receiver), and publishes where it lies:
  `Hop.lane` is `cuda:<handle>:<offset>`. The receiver opens the handle once, copies into memory of its own, and gives a credit.
- Every copy waits for what was issued to its device before and is done when it returns; it runs on a thread, so the loop never waits.
- A late header must never deliver another tensor's bytes. On a device that cannot be read off the slot, so a slot whose fate nobody knows
  is not used again: the lane is given up for that receiver, and its ring stays until the receiver was started anew or left.
- Where a device refuses, the lane is given up for that receiver with a line in the log, and tensors go through host memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import ClassVar

import structlog

from dcnr.bus.credit import Key, key
from dcnr.bus.lanes.announce import Announcements
from dcnr.bus.lanes.base import DTYPES, REFUSED, DeviceBuffer, DeviceSide, LaneBroken, Port, gone
from dcnr.bus.lanes.ring import Ring
from dcnr.bus.messages import Credit, Hop
from dcnr.bus.pace import PATIENCE
from dcnr.errors import BackendUnavailable, PeerError
from dcnr.ids import PNodeId

MIN_RING = 32 << 20
HANDLE = 64
"""Bytes of a handle (CUDA_IPC_HANDLE_SIZE)."""
_ALIGNMENT = 256
_GRAIN = 2 << 20

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(slots=True)
class _Staging:
    """The ring to one receiver."""

    address: int
    handle: bytes
    ring: Ring
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    copies: set[asyncio.Future[None]] = field(default_factory=set)
    """Those that write into it at this moment."""

    def free(self, start: int) -> None:
        self.ring.release(start)
        self.freed.set()


class CudaIpcLane:
    """Device memory to peers of our own host that have a device too."""

    name: ClassVar[str] = "cuda"

    def __init__(self, port: Port, device: DeviceSide, patience: float = PATIENCE) -> None:
        self._port = port
        self._device = device
        self._near: Collection[PNodeId] = ()
        self._given_up: set[PNodeId] = set()
        self._stagings: dict[PNodeId, _Staging] = {}
        self._opened: dict[PNodeId, dict[bytes, int]] = {}
        self._unused: list[_Staging] = []
        self._unread: list[int] = []
        self._taking: set[Key] = set()
        self._turn = asyncio.Lock()
        self._announcements = Announcements(port, patience)

    def set_near(self, peers: Collection[PNodeId]) -> None:
        """Who is on our host and has a device."""
        self._near = peers

    def serves(self, to: PNodeId) -> bool:
        """Whether tensors on our device can reach `to` there."""
        return to in self._near and to not in self._given_up

    async def send(self, to: PNodeId, hop: Hop, data: DeviceBuffer) -> asyncio.Future[None]:
        """Copy into the ring, waiting for room, and publish the header. `data` may change when this returns.

        Raises, or the future raises, `LaneBroken` or `WorldError`.
        """
        try:
            staging, start = await self._put(to, data)
        except BackendUnavailable as error:
            raise self._broken(to, str(error)) from error
        hop = replace(hop, lane=f"{self.name}:{staging.handle.hex()}:{start}")

        def settle(taken: bool) -> None:
            if taken:
                staging.free(start)
            elif self._stagings.get(to) is staging:
                self._given_up.add(to)
                staging.freed.set()

        return await self._announcements.send(to, hop, settle, lambda: self._broken(to, "the peer cannot open memory of our device"))

    def on_header(self, hop: Hop, payload: memoryview) -> None:
        """Begin to copy. Raises `PeerError`."""
        handle, start = _place(hop)
        if key(hop) in self._port.seen:
            self._port.acknowledge(hop.sender, hop.transfer, hop.nbytes)
        elif key(hop) not in self._taking:
            self._taking.add(key(hop))
            self._port.start(self._take(hop, handle, start)).add_done_callback(lambda _: self._taking.discard(key(hop)))

    def on_credit(self, credit: Credit) -> None:
        """The receiver has copied a slot, or cannot."""
        self._announcements.credit(credit)

    def release(self, peer: PNodeId) -> None:
        """Nobody reads what lies in its ring, and its memory is of no use: both go back in the background, in this order."""
        self._announcements.release(peer)
        self._given_up.discard(peer)
        self._leave(peer)
        self._port.start(self._let_go())

    async def close(self) -> None:
        """Give everything back. The port has ended the tasks."""
        for peer in {*self._stagings, *self._opened}:
            self._leave(peer)
        await self._let_go()

    def _leave(self, peer: PNodeId) -> None:
        if (staging := self._stagings.pop(peer, None)) is not None:
            staging.freed.set()
            self._unused.append(staging)
        self._unread += self._opened.pop(peer, {}).values()

    async def _let_go(self) -> None:
        """Give back what nobody uses any more, once the last copy from or to it is done."""
        while self._unused:
            staging = self._unused.pop()
            if staging.copies:
                await asyncio.wait(staging.copies)
            await asyncio.to_thread(self._device.port.unstage, staging.address)
        async with self._turn:
            while self._unread:
                await asyncio.to_thread(self._device.port.close, self._unread.pop())

    # -- sending ---------------------------------------------------------------------------------------------------------

    async def _put(self, to: PNodeId, data: DeviceBuffer) -> tuple[_Staging, int]:
        staging, start = await self._reserve(to, data.nbytes)

        def copy() -> None:  # it keeps `data` alive, whatever happens to the sender
            self._device.port.copy(staging.address + start, data.ptr, data.nbytes)

        copying = asyncio.ensure_future(asyncio.to_thread(copy))
        staging.copies.add(copying)
        copying.add_done_callback(staging.copies.discard)
        try:
            await asyncio.shield(copying)
        except asyncio.CancelledError:
            copying.add_done_callback(lambda done: staging.free(start) if done.cancelled() or done.exception() is None else None)
            raise
        except BackendUnavailable:
            staging.free(start)
            raise
        return staging, start

    async def _reserve(self, to: PNodeId, nbytes: int) -> tuple[_Staging, int]:
        staging = self._stagings.get(to)
        if staging is None or 2 * nbytes > staging.ring.size:
            staging = await self._renew(to, nbytes)
        while (start := staging.ring.reserve(nbytes)) is None:
            await self._freed(to, staging)
        return staging, start

    async def _freed(self, to: PNodeId, staging: _Staging) -> None:
        staging.freed.clear()
        await staging.freed.wait()
        self._port.check_open()
        if self._stagings.get(to) is not staging:
            raise gone(to)
        if to in self._given_up:
            raise LaneBroken(f"{to} is not reached from device to device any more")

    async def _renew(self, to: PNodeId, nbytes: int) -> _Staging:
        """A ring with room for two such tensors, once the old one is idle."""
        old = self._stagings.get(to)
        while old is not None and len(old.ring):
            await self._freed(to, old)
        size = max(MIN_RING, -(-2 * (nbytes + _ALIGNMENT) // _GRAIN) * _GRAIN)
        if old is not None:
            del self._stagings[to]
            await asyncio.to_thread(self._device.port.unstage, old.address)
        address, handle = await asyncio.to_thread(self._device.port.stage, size)
        staging = self._stagings[to] = _Staging(address, handle, Ring(size, _ALIGNMENT))
        return staging

    def _broken(self, to: PNodeId, why: str) -> LaneBroken:
        self._given_up.add(to)
        return LaneBroken(why)

    # -- receiving -------------------------------------------------------------------------------------------------------

    async def _take(self, hop: Hop, handle: bytes, start: int) -> None:
        device = self._device.port
        try:
            async with self._turn:  # in the order in which they came
                buffer = await asyncio.to_thread(device.empty, hop.shape, DTYPES[hop.dtype])
                source = await self._open(hop.sender, handle)
                await asyncio.to_thread(device.copy, buffer.ptr, source + start, hop.nbytes)
        except BackendUnavailable as error:
            _log.warning("no copy from device to device", pnode=self._port.me, peer=hop.sender, error=str(error))
            self._port.acknowledge(hop.sender, hop.transfer, REFUSED)
            return
        if self._port.seen.add(key(hop)):
            self._device.on_hop(hop, buffer)
        self._port.acknowledge(hop.sender, hop.transfer, hop.nbytes)

    async def _open(self, sender: PNodeId, handle: bytes) -> int:
        """Opened once. A sender has one ring at a time, so an old one is closed when a new one comes."""
        opened = self._opened.setdefault(sender, {})
        if handle not in opened:
            for old in [*opened]:
                await asyncio.to_thread(self._device.port.close, opened.pop(old))
            opened[handle] = await asyncio.to_thread(self._device.port.open, handle)
            if self._opened.get(sender) is not opened:  # released meanwhile; it is closed once our turn is over
                self._unread.append(opened[handle])
        return opened[handle]


def _place(hop: Hop) -> tuple[bytes, int]:
    """Handle and offset in `Hop.lane`."""
    match hop.lane.split(":"):
        case ["cuda", handle, start] if len(handle) == 2 * HANDLE and start.isdecimal() and hop.codec == "raw":
            try:
                return bytes.fromhex(handle), int(start)
            except ValueError:
                pass
    raise PeerError(f"hop: lane '{hop.lane[:64]}' names no place on a device")
