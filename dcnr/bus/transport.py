"""Tensors between PNodes: the header on the subject of the target VNode, the bytes over the best lane.

- Lanes in order of preference: shared memory (same host), inline (one message), TCP (peers that reach each other), chunks (always).
- Sends to one peer start in the order of the calls and do not wait for sends to other peers. A tensor is delivered when it is complete,
  so a small one may overtake a large one of another edge; those of one edge, which are of one size, keep their order as long as they
  take one lane.
- A transfer that is sent again is delivered once. One that nobody takes fails with `WorldError`, at once where the peer is known to be
  gone, else after a time that sets itself (`pace.Patience`); an inline one is lost as any message.
- A lane that breaks under a transfer is not tried again for it; the last one, chunks, does not break.
- Whatever comes from outside is checked; what is wrong is logged, counted in `dropped` and forgotten.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Container, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import structlog

from dcnr.bus import codec, subjects, wire
from dcnr.bus.base import Bus, Subscription
from dcnr.bus.lanes.base import Array, Bytes, DeviceBuffer, DeviceSide, Lane, LaneBroken, OnHop, Port, Receives, bytes_of, check, gone
from dcnr.bus.lanes.chunks import ChunksLane
from dcnr.bus.lanes.cuda_ipc import CudaIpcLane
from dcnr.bus.lanes.inline import InlineLane
from dcnr.bus.lanes.pool import Pool
from dcnr.bus.lanes.shm import ShmLane
from dcnr.bus.lanes.tcp import TcpLane
from dcnr.bus.messages import WITH_DEVICE, Credit, Hop, PeerLink, PNodeInfo
from dcnr.bus.pace import Pace
from dcnr.errors import InvariantError, PeerError
from dcnr.ids import NetworkId, NodeId, PNodeId

LARGE = 1 << 20
"""Bytes of a tensor that `links` speaks of: one that needs more than a message."""
SHOWN = 64
"""Peers in a heartbeat."""

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def host_id() -> str:
    """Equal for processes that see the same shared memory: the machine, and on Linux the very `/dev/shm` (a container has its own)."""
    boot, shm = Path("/proc/sys/kernel/random/boot_id"), Path("/dev/shm")
    machine = boot.read_text().strip() if boot.exists() else f"{uuid.getnode():x}"
    return f"{machine}-{os.stat(shm).st_dev if shm.is_dir() else 0}"


@dataclass(slots=True)
class _Door:
    """The way out to one peer, one send at a time. `closed`: that peer is gone; whoever bears its name now has another door."""

    turn: asyncio.Lock
    closed: bool = False


class HopTransport:
    """One PNode's end. `bus` is a connection of its own, apart from control; `host` is equal for processes that share memory.

    `on_hop(hop, array)` is called on the loop, once per transfer; it only enqueues. The array may be read-only, and is valid as long
    as it is referenced. `direct`: whether peers may connect to each other. `device`: where tensors may start and end, if there is one.
    """

    def __init__(self, bus: Bus, me: PNodeId, host: str, on_hop: OnHop, direct: bool = True, device: DeviceSide | None = None) -> None:
        self._bus = bus
        self._me = me
        self._host = host
        self._port = Port(bus, me, on_hop)
        pool = Pool()
        self._shm = ShmLane(self._port, pool, host)
        self._tcp = TcpLane(self._port, pool, bus.way if direct else None)
        self._chunks = ChunksLane(self._port, pool)
        self._lanes: tuple[Lane, ...] = (self._shm, InlineLane(self._port), self._tcp, self._chunks)
        self._device = device
        self._cuda = CudaIpcLane(self._port, device) if device is not None else None
        self._by_name: dict[str, Receives] = {lane.name: lane for lane in self._lanes}
        if self._cuda is not None:
            self._by_name[self._cuda.name] = self._cuda
        self._peers: dict[PNodeId, PNodeInfo] = {}
        self._pace = Pace()
        self._doors: dict[PNodeId, _Door] = {}
        self._turns: WeakValueDictionary[PNodeId, asyncio.Lock] = WeakValueDictionary()
        """By name: whoever bears it next waits until a send to the one before has let go of the lanes."""
        self._subscriptions: dict[tuple[NetworkId, NodeId], list[Subscription]] = {}
        self._credits: Subscription | None = None
        self._starting = asyncio.Lock()
        self._started = 0

    @property
    def dropped(self) -> Counter[str]:
        """Hops, chunks and credits that were dropped, by what was wrong."""
        return self._port.dropped

    async def listen(self, network: NetworkId, nodes: Iterable[NodeId]) -> None:
        """Hear the hops of these VNodes; those that are heard already stay so. Active at the server when this returns."""
        await self._start()
        await asyncio.gather(*(self._listen(network, node) for node in nodes if (network, node) not in self._subscriptions))

    async def unlisten(self, network: NetworkId, nodes: Iterable[NodeId]) -> None:
        """Hear them no more, and let go of what was half received."""
        gone = set(nodes)
        for node in gone:
            for subscription in self._subscriptions.pop((network, node), ()):
                await subscription.stop()
        self._tcp.forget(network, gone)
        self._chunks.forget(network, gone)

    def set_peers(self, infos: Iterable[PNodeInfo]) -> None:
        """Who takes part now. What is on its way to or from one that is named no more, or was started anew, ends at once.

        Others are still reached, but by the bus only.
        """
        named = {info.pnode: info for info in infos if info.pnode != self._me}
        for peer, known in self._peers.items():
            if peer not in named or named[peer].incarnation != known.incarnation:
                self._release(peer)
        self._peers = named
        self._shm.set_hosts({peer: info.host for peer, info in named.items()})
        if self._cuda is not None:
            self._cuda.set_near({peer for peer, info in named.items() if info.host == self._host and info.backend == WITH_DEVICE})
        self._chunks.set_peers(len(named))
        self._connect()

    def links(self) -> tuple[PeerLink, ...]:
        """How large tensors go to each peer now; at most `SHOWN` of them."""
        shown = []
        for peer in sorted(self._peers)[:SHOWN]:
            near = self._cuda is not None and self._cuda.serves(peer)
            lane = CudaIpcLane.name if near else self._lane(peer, LARGE).name
            rate = self._pace.rate(peer, lane) or (self._tcp.rate(peer) if lane == self._tcp.name else 0.0)
            shown.append(PeerLink(peer, lane, round(rate / 1e6, 1)))
        return tuple(shown)

    async def met(self, peer: PNodeId) -> None:
        """Wait until there is a direct connection to `peer`."""
        await self._start()
        await self._tcp.met(peer)

    async def send(self, to: PNodeId, hop: Hop, payload: Array | DeviceBuffer) -> None:
        """Send one tensor to the host of `hop.targets`; sender, transfer, lane, dtype, shape and nbytes of `hop` are filled in here.

        It goes as `hop.codec` says where that makes it smaller, else raw. Returns when the peer has it (inline: when it was published);
        until then `payload` must not change. Raises `WorldError` if the peer does not take it.

        A tensor on our device stays on devices where the peer has one too and shares our host; it is then never encoded.
        """
        self._port.check_open()
        await self._start()
        hop = replace(hop, sender=self._me, transfer=self._port.next_transfer(), dtype=payload.dtype.name, shape=payload.shape)
        if isinstance(payload, np.ndarray):
            await self._send_host(to, hop, payload)
        elif self._device is None:
            raise InvariantError("a tensor on a device, and a transport without one")
        elif not await self._send_device(to, hop, payload):
            await self._send_host(to, hop, await asyncio.to_thread(self._device.port.fetch, payload))

    async def _send_device(self, to: PNodeId, hop: Hop, payload: DeviceBuffer) -> bool:
        """Whether the peer has it now; False if it must go through host memory."""
        if self._cuda is None or not self._cuda.serves(to) or not payload.nbytes:
            return False
        hop = replace(hop, nbytes=payload.nbytes, codec="raw")
        door = self._door(to)
        try:
            async with self._through(to, door):
                start = time.perf_counter()
                arrived = await self._cuda.send(to, hop, payload)
            await self._arrival(to, door, arrived)
        except LaneBroken as error:
            self._give_up(to, door, self._cuda.name, error)
            return False
        self._pace.note(to, self._cuda.name, payload.nbytes, time.perf_counter() - start)
        return True

    async def _send_host(self, to: PNodeId, hop: Hop, payload: Array) -> None:
        encoding = wire.codec_for(hop.codec, payload.dtype)
        nbytes = wire.size(encoding, payload.dtype, payload.size)
        hop = replace(hop, nbytes=nbytes, codec=encoding)
        data: Bytes | None = None
        door, broken = self._door(to), set[str]()
        while True:
            lane = self._lane(to, nbytes, broken)
            try:
                async with self._through(to, door):
                    if data is None:
                        data = await self._encoded(encoding, payload)
                    start = time.perf_counter()
                    arrived = await lane.send(to, replace(hop, lane=lane.name), data)
                await self._arrival(to, door, arrived)
                return self._pace.note(to, lane.name, nbytes, time.perf_counter() - start)
            except LaneBroken as error:
                self._give_up(to, door, lane.name, error)
                broken.add(lane.name)
                self._connect()

    def _door(self, to: PNodeId) -> _Door:
        if to not in self._doors:
            self._doors[to] = _Door(self._turns.setdefault(to, asyncio.Lock()))
        return self._doors[to]

    @asynccontextmanager
    async def _through(self, to: PNodeId, door: _Door) -> AsyncIterator[None]:
        """One after the other. Raises `WorldError` if the peer was released meanwhile."""
        async with door.turn:
            if door.closed:
                raise gone(to)
            try:
                yield
            finally:
                if self._doors.get(to) is not door:  # it was released: what a lane has put up for it since then is of no use
                    self._leave(to)

    async def _arrival(self, to: PNodeId, door: _Door, arrived: asyncio.Future[None]) -> None:
        """Wait for it. What went out after the peer was released does not arrive."""
        if door.closed:
            arrived.cancel()
            raise gone(to)
        await arrived

    def _give_up(self, to: PNodeId, door: _Door, lane: str, error: LaneBroken) -> None:
        """The next lane may do better, unless the peer is gone. Raises `WorldError` then."""
        if door.closed:
            raise gone(to) from error
        _log.warning("lane given up", pnode=self._me, peer=to, lane=lane, why=str(error))

    async def close(self) -> None:
        """Stop hearing and sending; sends under way fail. The bus stays open: it is its owner's."""
        for subscription in [one for several in self._subscriptions.values() for one in several]:
            await subscription.stop()
        self._subscriptions.clear()
        if self._credits is not None:
            await self._credits.stop()
        await self._port.close()
        for lane in self._by_name.values():
            await lane.close()

    async def _start(self) -> None:
        async with self._starting:
            while self._started < len(self._lanes):  # without a server this fails, and is tried again
                await self._lanes[self._started].start()
                self._started += 1
            if self._credits is None:
                self._credits = await self._bus.subscribe(subjects.peer(self._me, "credit"), self._on_credit)

    def _release(self, peer: PNodeId) -> None:
        """It is gone, or was started anew: it gives nothing back that it holds of us, and takes nothing more."""
        if (door := self._doors.pop(peer, None)) is not None:
            door.closed = True
        self._leave(peer)
        self._pace.forget(peer)

    def _leave(self, peer: PNodeId) -> None:
        for lane in self._by_name.values():
            lane.release(peer)

    def _lane(self, to: PNodeId, nbytes: int, broken: Container[str] = ()) -> Lane:
        return next(lane for lane in self._lanes if lane.name not in broken and lane.serves(to, nbytes))

    async def _encoded(self, encoding: wire.Codec, payload: Array) -> Bytes:
        """Raw is a view; the rest is work for a thread."""
        return bytes_of(payload) if encoding == "raw" else await asyncio.to_thread(wire.encode, encoding, payload)

    def _connect(self) -> None:
        """Direct connections are for those with whom we share no memory."""
        self._tcp.set_peers(peer for peer in self._peers if not self._shm.reaches(peer))

    async def _listen(self, network: NetworkId, node: NodeId) -> None:
        async with AsyncExitStack() as undo:
            heard = []
            for phase in ("fwd", "bwd"):
                heard.append(await self._bus.subscribe(subjects.hop(network, node, phase), self._on_message))
                undo.push_async_callback(heard[-1].stop)
            undo.pop_all()
        self._subscriptions[network, node] = heard

    def _on_message(self, data: bytes) -> None:
        try:
            hop, payload = codec.decode_with_payload(data)
            if not isinstance(hop, Hop):
                raise PeerError(f"hop: a {type(hop).__name__} came instead")
            check(hop)
            lane = self._by_name.get(hop.lane.partition(":")[0])
            if lane is None:
                raise PeerError(f"hop: unknown lane '{hop.lane[:64]}'")
            lane.on_header(hop, payload)
        except PeerError as error:
            self._port.drop(error)

    def _on_credit(self, data: bytes) -> None:
        try:
            credit = codec.decode(data)
            if not isinstance(credit, Credit):
                raise PeerError(f"credit: a {type(credit).__name__} came instead")
        except PeerError as error:
            self._port.drop(error)
            return
        for lane in self._by_name.values():
            lane.on_credit(credit)
