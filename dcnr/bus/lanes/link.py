"""One connection between two PNodes: the handshake, then frames in both directions, the bytes straight into their destination.

- A frame is a head of 32 bytes and at most `PIECE` bytes of a transfer, so nothing waits long behind a large tensor.
- Reading asks for exactly what is missing next: a head into the link's own memory, a piece into the array that `Inbox.place` names.
- Writing waits while the socket is behind, so a peer that does not read stops us. One that takes nothing for `patience` seconds is gone;
  one that takes little is waited for.
- Whatever breaks the protocol ends the connection: there is no way to find the next frame.
"""

from __future__ import annotations

import asyncio
import struct
import time
from typing import Protocol, cast

from dcnr.bus.lanes.base import LaneBroken, resolve
from dcnr.bus.lanes.handshake import Caller, Listener
from dcnr.errors import DcnrError, PeerError
from dcnr.ids import PNodeId

PIECE = 4 << 20
"""Bytes of a transfer in one frame."""
PROBE = 8 << 20
"""Bytes that are sent to measure the speed of a new connection."""
HANDSHAKE_SECONDS = 5.0
_HEAD = struct.Struct("<IIQQQ")
"""Kind, bytes that follow, number, offset, bytes of the whole transfer."""
_DATA, _CANCEL, _PROBE, _PROBED = 1, 2, 3, 4


class Inbox(Protocol):
    """Who a link belongs to. Everything is called on the loop."""

    def established(self, link: Link) -> None:
        """The handshake is over; `link.peer` is who it says."""
        ...

    def place(self, link: Link, number: int, offset: int, size: int, nbytes: int) -> memoryview | None:
        """Where `size` bytes at `offset` of transfer `number` belong, which has `nbytes` bytes; None: nowhere. Raises `PeerError`."""
        ...

    def placed(self, link: Link, number: int, offset: int, size: int) -> None:
        """They are there."""
        ...

    def cancelled(self, link: Link, number: int) -> None:
        """The sender has given up a transfer."""
        ...

    def lost(self, link: Link, error: PeerError | None) -> None:
        """The connection is no more. `error`: the peer broke the protocol."""
        ...


class Link(asyncio.BufferedProtocol):
    """One connection. `rate`: measured bytes per second towards the peer, 0 until it is known. `since`: when the handshake was over."""

    def __init__(self, greeting: Caller | Listener, inbox: Inbox, patience: float) -> None:
        self.rate = self.since = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the handshake is over; fails with `LaneBroken`."""
        self._greeting = greeting
        self._inbox = inbox
        self._patience = patience
        self._transport: asyncio.Transport | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._turn = asyncio.Lock()
        self._scratch = bytearray(PIECE)
        self._target = memoryview(self._scratch)[: greeting.expects]
        self._filled = 0
        self._piece: tuple[int, int, int, int, int] | None = None
        self._error: PeerError | None = None
        self._probe: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.ready.add_done_callback(lambda ready: ready.exception())  # nobody may be waiting for it

    @property
    def peer(self) -> PNodeId:
        """Who is at the other end, as far as it is proven."""
        return cast("PNodeId", self._greeting.peer)

    @property
    def is_open(self) -> bool:
        """Whether frames can be sent."""
        return self.ready.done() and not self.ended.done()

    # -- sending ---------------------------------------------------------------------------------------------------------

    async def send(self, number: int, data: memoryview) -> None:
        """Write a whole transfer; returns when all of it has left this process. Raises `LaneBroken`."""
        await self._send(_DATA, number, data)

    def cancel(self, number: int) -> None:
        """Tell the peer that no more of a transfer comes and nobody waits for it."""
        if self._transport is not None and not self.ended.done():
            self._transport.write(_HEAD.pack(_CANCEL, 0, number, 0, 0))

    async def measure(self) -> float:
        """Bytes per second of a short transfer, which becomes `rate`."""
        if self._probe is None:
            self._probe = asyncio.get_running_loop().create_future()
            start = time.perf_counter()
            await self._send(_PROBE, 0, memoryview(bytes(PROBE)))
            await self._probe
            self.rate = PROBE / (time.perf_counter() - start)
        return self.rate

    def abort(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()

    async def _send(self, kind: int, number: int, data: memoryview) -> None:
        for offset in range(0, len(data), PIECE):
            part = data[offset : offset + PIECE]
            async with self._turn:
                await self._write(_HEAD.pack(kind, len(part), number, offset, len(data)), part)

    async def _write(self, head: bytes, part: memoryview) -> None:
        if self._transport is None or self.ended.done():
            raise LaneBroken(f"the connection to {self.peer} broke")
        self._transport.write(head)
        self._transport.write(part)
        try:
            await self._left(self._transport)
        except asyncio.CancelledError:
            if not self._room.is_set():  # what waits here lies in memory that its owner may change from now on
                self.abort()
            raise

    async def _left(self, transport: asyncio.Transport) -> None:
        """Until everything has left this process, however slowly."""
        waiting = transport.get_write_buffer_size()
        while True:
            try:
                async with asyncio.timeout(self._patience):
                    await self._room.wait()
                return
            except TimeoutError:
                waited, waiting = waiting, transport.get_write_buffer_size()
                if waiting >= waited:
                    self.abort()
                    raise LaneBroken(f"{self.peer} has taken nothing for {self._patience:g} s") from None

    # -- what asyncio calls ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Speak first, if that is our part."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(1, 0)  # so that `pause_writing` means: something has not left yet (0 hangs under TLS)
        self._transport.write(self._greeting.opening())
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits for this connection learns it."""
        if self._timer is not None:
            self._timer.cancel()
        broken: DcnrError = LaneBroken(f"the connection to {self._greeting.peer or 'a caller'} broke: {self._error or exc or 'closed'}")
        resolve(self.ready, broken)
        resolve(self.ended)
        if self._probe is not None:
            resolve(self._probe, broken)
        self._room.set()
        self._inbox.lost(self, self._error)

    def pause_writing(self) -> None:
        """The socket is behind."""
        self._room.clear()

    def resume_writing(self) -> None:
        """It is no more."""
        self._room.set()

    def eof_received(self) -> bool:
        """A half-closed connection is of no use."""
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._target[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """They are there."""
        self._filled += nbytes
        if self._filled < len(self._target):
            return
        try:
            self._advance()
        except PeerError as error:
            self._error = error
            self.abort()
            self._expect(memoryview(self._scratch))

    # -- reading ---------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        if self._greeting.expects:
            self._greet(bytes(self._target))
        elif self._piece is None:
            self._open_frame(*_HEAD.unpack(self._target))
        else:
            self._close_frame(*self._piece)

    def _expect(self, target: memoryview) -> None:
        self._target, self._filled = target, 0

    def _expect_head(self) -> None:
        self._piece = None
        self._expect(memoryview(self._scratch)[: _HEAD.size])

    def _greet(self, data: bytes) -> None:
        assert self._transport is not None
        tls = self._transport.get_extra_info("ssl_object")
        binding = b"" if tls is None else tls.get_channel_binding("tls-unique")
        self._transport.write(self._greeting.answer(data, binding))
        if self._greeting.expects:
            self._expect(memoryview(self._scratch)[: self._greeting.expects])
            return
        self._expect_head()
        if self._timer is not None:
            self._timer.cancel()
        self.since = asyncio.get_running_loop().time()
        self._inbox.established(self)
        resolve(self.ready)

    def _open_frame(self, kind: int, size: int, number: int, offset: int, nbytes: int) -> None:
        if kind == _CANCEL:
            self._inbox.cancelled(self, number)
            return self._expect_head()
        if kind == _PROBED and self._probe is not None:
            resolve(self._probe)
            return self._expect_head()
        if kind not in (_DATA, _PROBE) or not 0 < size <= PIECE or offset + size > nbytes:
            raise PeerError(f"frame: kind {kind}, bytes {offset} to {offset + size} of {nbytes}")
        target = self._inbox.place(self, number, offset, size, nbytes) if kind == _DATA else None
        self._piece = (kind, size, number, offset, nbytes)
        self._expect(target if target is not None else memoryview(self._scratch)[:size])
        return None

    def _close_frame(self, kind: int, size: int, number: int, offset: int, nbytes: int) -> None:
        self._expect_head()
        if kind == _DATA:
            self._inbox.placed(self, number, offset, size)
        elif offset + size == nbytes and self._transport is not None:
            self._transport.write(_HEAD.pack(_PROBED, 0, number, 0, 0))

    def _give_up(self) -> None:
        self._error = PeerError(f"handshake: not over after {HANDSHAKE_SECONDS:g} s")
        self.abort()
