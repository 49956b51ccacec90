"""The lane that always works: chunks over the bus, with credits. `bus/chunks.py` decides, this file sends and copies."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import ClassVar, assert_never

import structlog

from dcnr.bus import codec, subjects
from dcnr.bus.base import Subscription
from dcnr.bus.chunks import Complete, Discard, Effect, Grant, Inflow, Outflow, SendChunk, SendHeader, Write
from dcnr.bus.credit import Key, key, window
from dcnr.bus.lanes.base import TENSOR_LIMIT, Bytes, Port, gone, resolve, silent
from dcnr.bus.lanes.pool import Pool
from dcnr.bus.messages import Chunk, Credit, Hop
from dcnr.bus.pace import PATIENCE, TRIES
from dcnr.errors import PeerError, WorldError
from dcnr.ids import NetworkId, NodeId, PNodeId

CHUNK = 512 << 10
_CHUNK_ROOM = 512
"""Bytes of a message left for the header of a chunk."""

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(slots=True)
class _Transfer:
    hop: Hop
    data: Bytes
    sent: asyncio.Future[None]
    arrived: asyncio.Future[None]


@dataclass(slots=True)
class _Flow:
    """Everything on its way to one receiver, and the task that sends it."""

    to: PNodeId
    machine: Outflow
    transfers: dict[int, _Transfer] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class ChunksLane:
    """One flow per receiver; one subscription for all senders."""

    name: ClassVar[str] = "chunks"

    def __init__(self, port: Port, pool: Pool, patience: float = PATIENCE) -> None:
        self._port = port
        self._pool = pool
        self._patience = patience
        self._window = window(1)
        self._flows: dict[PNodeId, _Flow] = {}
        self._inflow = Inflow(TENSOR_LIMIT, port.seen)
        self._buffers: dict[Key, Bytes] = {}
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Hear chunks."""
        self._subscription = await self._port.bus.subscribe(subjects.peer(self._port.me, "chunk"), self._on_chunk)

    def set_peers(self, count: int) -> None:
        """How many may send to one receiver, which bounds each flow."""
        self._window = window(count)
        for flow in self._flows.values():
            flow.machine.window = self._window

    def serves(self, to: PNodeId, nbytes: int) -> bool:
        """Anything but nothing."""
        return nbytes > 0

    async def send(self, to: PNodeId, hop: Hop, data: Bytes) -> asyncio.Future[None]:
        """Queue behind what is on its way to `to`; returns when the last byte has left."""
        self._port.check_open()
        loop = asyncio.get_running_loop()
        transfer = _Transfer(replace(hop, lane=self.name), data, loop.create_future(), loop.create_future())
        flow = self._flows.get(to)
        if flow is None:
            flow = self._flows[to] = _Flow(to, Outflow(self._window, CHUNK, self._patience, TRIES))
        flow.machine.chunk = min(CHUNK, self._port.bus.max_payload - _CHUNK_ROOM)  # the server may be another one by now
        flow.transfers[hop.transfer] = transfer
        flow.machine.add(hop.transfer, hop.nbytes, loop.time())
        flow.wake.set()
        if flow.task is None or flow.task.done():
            flow.task = self._port.start(self._pump(flow))
            flow.task.add_done_callback(lambda task: self._abandon(flow) if task is flow.task else None)
        transfer.arrived.add_done_callback(lambda arrived: self._give_up(flow, hop.transfer) if arrived.cancelled() else None)
        try:
            await transfer.sent
        except asyncio.CancelledError:
            self._give_up(flow, hop.transfer)
            raise
        return transfer.arrived

    def on_header(self, hop: Hop, payload: memoryview) -> None:
        """The bytes come, or came, on their own subject."""
        self._perform(self._inflow.header(hop, asyncio.get_running_loop().time()), payload)

    def on_credit(self, credit: Credit) -> None:
        """A receiver took bytes: more may follow."""
        flow = self._flows.get(credit.receiver)
        if flow is None:
            return
        if flow.machine.credit(credit.transfer, credit.received, asyncio.get_running_loop().time()):
            self._settle(flow, credit.transfer)
        flow.wake.set()

    def forget(self, network: NetworkId, nodes: Container[NodeId]) -> None:
        """Let go of half-received hops to these nodes."""
        self._perform(self._inflow.forget(network, nodes), memoryview(b""))

    def release(self, peer: PNodeId) -> None:
        """What is under way to it fails at once; what it had begun to send is let go."""
        flow = self._flows.pop(peer, None)
        if flow is not None:
            for number in tuple(flow.transfers):
                self._settle(flow, number, gone(peer))
                flow.machine.drop(number)
            flow.wake.set()
        self._perform(self._inflow.release(peer, asyncio.get_running_loop().time()), memoryview(b""))

    async def close(self) -> None:
        """Stop hearing. The port has ended the sending."""
        if self._subscription is not None:
            await self._subscription.stop()
        self._buffers.clear()

    async def _pump(self, flow: _Flow) -> None:
        while flow.transfers:
            step = flow.machine.next(asyncio.get_running_loop().time())
            try:
                match step:
                    case SendHeader(number):
                        await self._port.publish(flow.transfers[number].hop)
                    case SendChunk(number):
                        await self._publish_chunk(flow, step)
                        self._mark_sent(flow, number)
                        await asyncio.sleep(0)  # publishing does not wait: let the socket and the other flows have their turn
                    case None:
                        await self._wait(flow)
                    case _:
                        assert_never(step)
            except WorldError as error:  # no connection: the machine sends it again in time
                _log.debug("chunk not sent", to=flow.to, error=str(error))

    async def _publish_chunk(self, flow: _Flow, step: SendChunk) -> None:
        transfer = flow.transfers[step.transfer]
        part = transfer.data[step.offset : step.offset + step.size]
        message = codec.encode_with_payload(Chunk(self._port.me, step.transfer, step.offset, transfer.hop.nbytes), part.data)
        await self._port.bus.publish(subjects.peer(flow.to, "chunk"), message)

    async def _wait(self, flow: _Flow) -> None:
        """Until a credit or transfer comes, or it is time to send again."""
        flow.wake.clear()
        due = flow.machine.deadline()
        try:
            async with asyncio.timeout_at(due):
                await flow.wake.wait()
        except TimeoutError:
            for number in flow.machine.tick(asyncio.get_running_loop().time()):
                self._settle(flow, number, silent(flow.to))

    def _mark_sent(self, flow: _Flow, number: int) -> None:
        transfer = flow.transfers.get(number)
        if transfer is not None and flow.machine.is_sent(number):
            resolve(transfer.sent)

    def _settle(self, flow: _Flow, number: int, error: Exception | None = None) -> None:
        transfer = flow.transfers.pop(number, None)
        if transfer is not None:
            resolve(transfer.arrived, error)
            resolve(transfer.sent)

    def _abandon(self, flow: _Flow) -> None:
        """The last pump has ended: with nothing left, unless it was cancelled."""
        for number in tuple(flow.transfers):
            self._settle(flow, number, WorldError(f"a tensor on its way to {flow.to} was given up"))
            flow.machine.drop(number)

    def _give_up(self, flow: _Flow, number: int) -> None:
        flow.transfers.pop(number, None)
        flow.machine.drop(number)
        flow.wake.set()

    def _on_chunk(self, data: bytes) -> None:
        try:
            chunk, payload = codec.decode_with_payload(data)
            if not isinstance(chunk, Chunk):
                raise PeerError(f"chunk: a {type(chunk).__name__} came instead")
            self._perform(self._inflow.chunk(chunk, len(payload), asyncio.get_running_loop().time()), payload)
        except PeerError as error:
            self._port.drop(error)

    def _perform(self, effects: list[Effect], payload: memoryview) -> None:
        for effect in effects:
            match effect:
                case Write(transfer, offset, skip, nbytes):
                    buffer = self._buffers.get(transfer)
                    if buffer is None:
                        buffer = self._buffers[transfer] = self._pool.take(nbytes)
                    part = payload[skip:]
                    buffer.data[offset : offset + len(part)] = part
                case Grant((sender, number), received):
                    self._port.acknowledge(sender, number, received)
                case Complete(hop):
                    self._port.deliver(hop, self._buffers.pop(key(hop)))
                case Discard(transfer):
                    self._buffers.pop(transfer, None)
                case _:
                    assert_never(effect)
