"""The lane between PNodes that reach each other directly: the header over the bus, the bytes over a connection of their own.

- `rendezvous` makes the connections, `link` carries the bytes; this file knows transfers. Header and bytes may come in any order.
- The receiver reads each piece straight into the array that is delivered. It acknowledges whole transfers, by a credit over the bus.
- At most `WINDOW` bytes (or two tensors) to one receiver are not acknowledged. A receiver that does not read stops the sender by itself.
- The bytes cannot get lost as long as the connection stands, so only the header is repeated. What the socket holds takes no longer to
  arrive than the whole took to leave, so a slow connection has its time. One that breaks gives its transfers back as `LaneBroken`; they
  go another way, and `Port.seen` sees to it that each is delivered once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import structlog

from dcnr.bus.base import Way
from dcnr.bus.credit import RECEIVER_WINDOW, Key, key
from dcnr.bus.lanes.base import TENSOR_LIMIT, Bytes, LaneBroken, Port, gone, resolve, silent
from dcnr.bus.lanes.link import Link
from dcnr.bus.lanes.pool import Pool
from dcnr.bus.lanes.rendezvous import Rendezvous
from dcnr.bus.messages import Credit, Hop
from dcnr.bus.pace import PATIENCE, Patience
from dcnr.errors import PeerError, WorldError
from dcnr.ids import NetworkId, NodeId, PNodeId

TCP_FROM = 64 << 10
"""Below, a message is as fast and needs no credit."""
WINDOW = RECEIVER_WINDOW
STALLED = 4
"""So many pauses of a peer of which nothing is known without a byte that leaves, and the connection is dead."""
UNDER_WAY = WINDOW // TCP_FROM
"""Transfers of one sender that may be half received."""

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(slots=True)
class _Outgoing:
    to: PNodeId
    link: Link
    nbytes: int
    credited: asyncio.Event = field(default_factory=asyncio.Event)
    released: bool = False


@dataclass(slots=True)
class _Incoming:
    """`link` is None while only the header is there; `buffer` is None where nobody wants the bytes."""

    nbytes: int
    link: Link | None = None
    buffer: Bytes | None = None
    hop: Hop | None = None
    received: int = 0


class TcpLane:
    """Direct connections to the peers that `set_peers` names. `way`: how the bus is reached; None switches the lane off."""

    name: ClassVar[str] = "tcp"

    def __init__(self, port: Port, pool: Pool, way: Way | None, patience: float = PATIENCE) -> None:
        self._port = port
        self._pool = pool
        self._first = patience
        self._patience: dict[PNodeId, Patience] = {}
        self._rendezvous = Rendezvous(port, self, way, patience * STALLED) if way is not None else None
        self._outgoing: dict[int, _Outgoing] = {}
        self._freed: dict[PNodeId, asyncio.Event] = {}
        self._incoming: dict[PNodeId, dict[int, _Incoming]] = {}

    async def start(self) -> None:
        """Listen."""
        if self._rendezvous is not None:
            await self._rendezvous.start()

    def set_peers(self, peers: Iterable[PNodeId]) -> None:
        """Whom a connection is worth; others are let go."""
        if self._rendezvous is not None:
            self._rendezvous.seek(peers)

    async def met(self, peer: PNodeId) -> None:
        """Wait until there is a connection to `peer`."""
        if self._rendezvous is not None:
            await self._rendezvous.met(peer)

    def rate(self, peer: PNodeId) -> float:
        """Bytes per second as measured when the connection was made; 0 where there is none."""
        link = self._link(peer)
        return link.rate if link is not None else 0.0

    def serves(self, to: PNodeId, nbytes: int) -> bool:
        """Tensors worth it, to whom we are connected."""
        return nbytes >= TCP_FROM and self._link(to) is not None

    async def send(self, to: PNodeId, hop: Hop, data: Bytes) -> asyncio.Future[None]:
        """Publish the header and write the bytes, waiting for room; returns when the socket has them."""
        await self._room(to, len(data))
        link = self._link(to)
        if link is None:
            raise LaneBroken(f"no connection to {to}")
        hop = replace(hop, lane=self.name)
        self._outgoing[hop.transfer] = _Outgoing(to, link, len(data))
        left, time = False, asyncio.get_running_loop().time
        began = time()
        try:
            await self._announce(hop)
            await link.send(hop.transfer, data.data)
            left = True
        finally:
            if not left:  # broken or cancelled: the peer must not wait for the rest
                link.cancel(hop.transfer)
                self._forget(hop.transfer)
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def over(task: asyncio.Task[Exception | None]) -> None:
            given_up = WorldError(f"a tensor on its way to {to} was given up")
            outcome = given_up if task.cancelled() else task.result()
            if outcome is not None:
                link.cancel(hop.transfer)
            self._forget(hop.transfer)
            resolve(arrived, outcome)

        self._port.start(self._see_through(hop, arrived, time() - began)).add_done_callback(over)
        return arrived

    def on_header(self, hop: Hop, payload: memoryview) -> None:
        """The bytes come, or came, over the connection."""
        if key(hop) in self._port.seen:
            self._port.acknowledge(hop.sender, hop.transfer, hop.nbytes)
            return
        coming = self._incoming.setdefault(hop.sender, {})
        transfer = coming.get(hop.transfer)
        if transfer is None:
            _make_room(coming)
            transfer = coming[hop.transfer] = _Incoming(hop.nbytes)
        if transfer.nbytes != hop.nbytes:
            raise PeerError(f"hop: {hop.nbytes} bytes announced for a transfer of {transfer.nbytes}")
        transfer.hop = hop
        self._finish(hop.sender, hop.transfer)

    def on_credit(self, credit: Credit) -> None:
        """A receiver has a transfer."""
        transfer = self._outgoing.get(credit.transfer)
        if transfer is not None and transfer.to == credit.receiver and credit.received == transfer.nbytes:
            transfer.credited.set()

    def forget(self, network: NetworkId, nodes: Container[NodeId]) -> None:
        """Let go of half-received hops to these nodes; bytes that still come for them go nowhere."""
        for coming in self._incoming.values():
            for number, transfer in tuple(coming.items()):
                hop = transfer.hop
                if hop is not None and hop.network == network and hop.targets[0][0] in nodes:
                    transfer.hop = transfer.buffer = None
                    if transfer.link is None:
                        del coming[number]

    def release(self, peer: PNodeId) -> None:
        """The connections to it end, and with them what is under way in both directions."""
        self._patience.pop(peer, None)
        for transfer in self._outgoing.values():
            if transfer.to == peer:
                transfer.released = True
                transfer.credited.set()
        if self._rendezvous is not None:
            self._rendezvous.release(peer)
        self._incoming.pop(peer, None)
        if (freed := self._freed.pop(peer, None)) is not None:
            freed.set()

    async def close(self) -> None:
        """Close the connections. The port has ended the tasks."""
        if self._rendezvous is not None:
            await self._rendezvous.close()
        for event in self._freed.values():
            event.set()
        self._incoming.clear()

    # -- sending ---------------------------------------------------------------------------------------------------------

    def _link(self, to: PNodeId) -> Link | None:
        return self._rendezvous.link(to) if self._rendezvous is not None else None

    async def _room(self, to: PNodeId, nbytes: int) -> None:
        while True:
            self._port.check_open()
            freed = self._freed.setdefault(to, asyncio.Event())
            under_way = [transfer.nbytes for transfer in self._outgoing.values() if transfer.to == to]
            if len(under_way) < 2 or (sum(under_way) + nbytes <= WINDOW and len(under_way) < UNDER_WAY):
                return
            freed.clear()
            await freed.wait()

    async def _announce(self, hop: Hop) -> None:
        try:
            await self._port.publish(hop)
        except WorldError as error:  # no connection to the bus; it is repeated
            _log.debug("header not sent", to=hop.targets, error=str(error))

    async def _see_through(self, hop: Hop, arrived: asyncio.Future[None], took: float) -> Exception | None:
        """Repeat the header until there is a credit or the connection breaks; returns what went wrong. `took`: seconds to leave."""
        transfer, time, again = self._outgoing[hop.transfer], asyncio.get_running_loop().time, 0
        patience, began = self._patience.setdefault(transfer.to, Patience(self._first)), time()
        credited = asyncio.ensure_future(transfer.credited.wait())
        over: list[asyncio.Future[Any]] = [credited, transfer.link.ended, arrived]
        try:
            while time() < began + took + patience.limit:
                if again:
                    await self._announce(hop)
                await asyncio.wait(over, timeout=patience.pause(again), return_when=asyncio.FIRST_COMPLETED)
                if transfer.released:
                    return gone(transfer.to)
                if credited.done():
                    if not again:
                        patience.note(time() - began)
                    return None
                if transfer.link.ended.done():
                    return LaneBroken(f"the connection to {transfer.to} broke")
                if arrived.done():
                    return WorldError("nobody waits for it any more")
                again += 1
        finally:
            credited.cancel()
        return silent(transfer.to)

    def _forget(self, number: int) -> None:
        transfer = self._outgoing.pop(number, None)
        if transfer is not None and transfer.to in self._freed:
            self._freed[transfer.to].set()

    # -- receiving: what a link tells ------------------------------------------------------------------------------------

    def established(self, link: Link) -> None:
        """A handshake is over."""
        assert self._rendezvous is not None
        self._rendezvous.established(link)

    def place(self, link: Link, number: int, offset: int, size: int, nbytes: int) -> memoryview | None:
        """Where a piece belongs. Raises `PeerError` if it does not follow the one before, or there is too much."""
        at: Key = (link.peer, number)
        coming = self._incoming.setdefault(link.peer, {})
        transfer = coming.get(number)
        if transfer is None:
            if at in self._port.seen:
                return None
            if nbytes > TENSOR_LIMIT:
                raise PeerError(f"frame: a transfer of {nbytes} bytes; the limit is {TENSOR_LIMIT}")
            _make_room(coming)
            transfer = coming[number] = _Incoming(nbytes)
        if transfer.link is None:
            transfer.link = link
            transfer.buffer = self._pool.take(transfer.nbytes)
        if transfer.link is not link or transfer.nbytes != nbytes or transfer.received != offset:
            raise PeerError(f"frame: bytes at {offset} of {nbytes}; expected at {transfer.received} of {transfer.nbytes}")
        return None if transfer.buffer is None else transfer.buffer.data[offset : offset + size]

    def placed(self, link: Link, number: int, offset: int, size: int) -> None:
        """A piece is there."""
        transfer = self._incoming.get(link.peer, {}).get(number)
        if transfer is not None and transfer.link is link:
            transfer.received = offset + size
            self._finish(link.peer, number)

    def cancelled(self, link: Link, number: int) -> None:
        """The sender has given up a transfer."""
        self._incoming.get(link.peer, {}).pop(number, None)

    def lost(self, link: Link, error: PeerError | None) -> None:
        """What had begun to come over this connection does not end."""
        if error is not None:
            self._port.drop(error)
        if self._rendezvous is not None:
            self._rendezvous.lost(link)
        if not link.ready.done() or link.ready.exception() is not None:
            return
        coming = self._incoming.get(link.peer, {})
        alone = self._link(link.peer) is None
        for number, transfer in tuple(coming.items()):
            if transfer.link is link or (transfer.link is None and alone):
                del coming[number]

    def _finish(self, sender: PNodeId, number: int) -> None:
        """Deliver a transfer that is complete; let go of one that is of no use any more."""
        transfer, at = self._incoming[sender][number], (sender, number)
        wanted = transfer.buffer is not None and at not in self._port.seen
        if transfer.received < transfer.nbytes or (wanted and transfer.hop is None):
            return
        del self._incoming[sender][number]
        if wanted and transfer.hop is not None and transfer.buffer is not None:
            self._port.seen.add(at)
            self._port.deliver(transfer.hop, transfer.buffer)
            self._port.acknowledge(sender, number, transfer.nbytes)


def _make_room(coming: dict[int, _Incoming]) -> None:
    """Let go of the oldest header without bytes, if need be. Raises `PeerError` if a sender has too much under way."""
    if len(coming) >= UNDER_WAY:
        oldest = next((number for number, transfer in coming.items() if transfer.link is None), None)
        if oldest is None:
            raise PeerError(f"frame: more than {UNDER_WAY} transfers of one sender are under way")
        del coming[oldest]
