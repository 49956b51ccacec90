"""Tensors over direct connections: the common cases, and every way in which a connection or a peer can go wrong."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from dcnr.bus import codec
from dcnr.bus.base import Way
from dcnr.bus.lanes import rendezvous
from dcnr.bus.lanes.base import LaneBroken, bytes_of
from dcnr.bus.lanes.link import _HEAD, PIECE, Link
from dcnr.bus.lanes.pool import Pool
from dcnr.bus.lanes.tcp import STALLED, TCP_FROM, UNDER_WAY, TcpLane
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import Hop
from dcnr.errors import WorldError
from dcnr.ids import NodeId, PNodeId
from tests.bus.contract import until
from tests.bus.lanes.contract import NETWORK, TARGET, AcknowledgedLaneContract, End, Pair, hop_for, make_end

S, R = PNodeId("s"), PNodeId("r")
PLAIN, ENCRYPTED = Way("127.0.0.1", encrypted=False), Way("127.0.0.1", encrypted=True)


def lane_of(end: End) -> TcpLane:
    """With its type."""
    assert isinstance(end.lane, TcpLane)
    return end.lane


def link_of(end: End, peer: PNodeId) -> Link:
    """The connection to `peer`."""
    link = lane_of(end)._link(peer)
    assert link is not None
    return link


async def tcp_pair(patience: float = 0.05, way: Way = PLAIN) -> tuple[End, End]:
    """Sender and receiver, connected."""
    broker = MemoryBroker()
    sender = await make_end(broker, S, lambda port: TcpLane(port, Pool(), way, patience))
    receiver = await make_end(broker, R, lambda port: TcpLane(port, Pool(), way, patience))
    for end, peer in ((sender, R), (receiver, S)):
        await end.open()
        lane_of(end).set_peers([peer])
    await asyncio.gather(lane_of(sender).met(R), lane_of(receiver).met(S))
    sender.hear = lambda data: None  # type: ignore[method-assign]
    return sender, receiver


async def close(*ends: End) -> None:
    """All of them."""
    for end in ends:
        await end.close()


class TestTcp(AcknowledgedLaneContract):
    """The common cases; the largest takes several frames."""

    sizes = (1, 4097, 300_001)

    @pytest.fixture
    def pair(self) -> Pair:
        """Connected in the clear."""
        return tcp_pair

    async def begin_anew(self, sender: End, receiver: End) -> None:
        """A connection that ended is made anew."""
        await lane_of(sender).met(R)


class TestTcpUnderTls(AcknowledgedLaneContract):
    """The common cases on an encrypted connection."""

    sizes = (1, 4097, 300_001)

    @pytest.fixture
    def pair(self) -> Pair:
        """Connected under TLS."""
        return lambda: tcp_pair(way=ENCRYPTED)

    async def begin_anew(self, sender: End, receiver: End) -> None:
        """A connection that ended is made anew."""
        await lane_of(sender).met(R)


async def test_it_serves_tensors_worth_it_to_connected_peers() -> None:
    """And its speed is known from the start."""
    sender, receiver = await tcp_pair()
    assert sender.lane.serves(R, TCP_FROM)
    assert not sender.lane.serves(R, TCP_FROM - 1)
    assert not sender.lane.serves(PNodeId("other"), TCP_FROM)
    assert lane_of(sender).rate(R) > 0
    assert lane_of(sender).rate(PNodeId("other")) == 0
    await close(sender, receiver)


async def test_both_directions_share_a_connection() -> None:
    """Activations one way, gradients the other, at the same time."""
    sender, receiver = await tcp_pair(patience=5)
    del sender.hear
    arrays = [np.full(3 * PIECE, number, np.uint8) for number in range(4)]

    async def send(origin: End, to: End) -> None:
        for array in arrays:
            await origin.send(to, array)

    there = asyncio.create_task(send(sender, receiver))
    hop = hop_for(arrays[0], receiver.port.next_transfer(), R)
    back = await receiver.lane.send(S, hop, bytes_of(arrays[0]))
    sender.lane.on_header(replace(hop, lane="tcp"), memoryview(b""))
    await asyncio.gather(there, back)
    assert [int(array[-1]) for _, array in receiver.got] == [0, 1, 2, 3]
    assert len(sender.got) == 1
    await close(sender, receiver)


async def test_a_receiver_that_does_not_read_stops_the_sender() -> None:
    """Bytes wait at their origin, not in between."""
    sender, receiver = await tcp_pair(patience=60)
    incoming = link_of(receiver, S)._transport
    assert incoming is not None
    incoming.pause_reading()
    array = np.zeros(64 << 20, np.uint8)
    task = asyncio.create_task(sender.send(receiver, array))
    await until(lambda: bool(receiver.headers) and not link_of(sender, R)._room.is_set())
    for _ in range(100):
        await asyncio.sleep(0)
    assert not task.done()
    incoming.resume_reading()
    await task
    assert receiver.got[0][1].nbytes == array.nbytes
    await close(sender, receiver)


async def test_two_tensors_that_nobody_acknowledged_are_enough() -> None:
    """Whatever their size; the third waits for a credit."""
    sender, receiver = await tcp_pair(patience=60)
    receiver.lose = 2
    array = np.zeros(20 << 20, np.uint8)
    tasks = [asyncio.create_task(sender.send(receiver, array)) for _ in range(2)]
    await until(lambda: len(receiver.headers) == 2)
    third = asyncio.create_task(sender.send(receiver, array))
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(receiver.headers) == 2
    for header in receiver.headers[:2]:
        receiver.hear(header)
    await asyncio.gather(*tasks, third)
    await close(sender, receiver)


async def test_a_connection_that_breaks_in_the_middle_gives_its_tensors_back_and_is_made_anew() -> None:
    """`LaneBroken`, and nothing half received is left."""
    sender, receiver = await tcp_pair(patience=60)
    incoming = link_of(receiver, S)
    assert incoming._transport is not None
    incoming._transport.pause_reading()
    task = asyncio.create_task(sender.send(receiver, np.zeros(64 << 20, np.uint8)))
    await until(lambda: bool(receiver.headers) and not link_of(sender, R)._room.is_set())
    incoming.abort()
    with pytest.raises(LaneBroken, match="the connection to r broke"):
        await task
    await until(lambda: not any(lane_of(receiver)._incoming.values()))
    assert receiver.got == []
    await lane_of(sender).met(R)
    await sender.send(receiver, np.ones(PIECE, np.uint8))
    assert len(receiver.got) == 1
    await close(sender, receiver)


async def test_a_connection_that_only_one_side_has_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A side that does not read, or whose machine lost the network, does not see the end."""
    monkeypatch.setattr(rendezvous, "FRESH", 0)
    sender, receiver = await tcp_pair()
    incoming = link_of(receiver, S)
    assert incoming._transport is not None
    incoming._transport.pause_reading()
    link_of(sender, R).abort()
    await until(lambda: lane_of(sender)._link(R) is None)
    await lane_of(sender).met(R)
    await sender.send(receiver, np.ones(PIECE, np.uint8))
    assert not incoming.is_open
    await close(sender, receiver)


async def test_a_connection_that_breaks_before_the_credit_gives_the_tensor_back() -> None:
    """All bytes are there; the header is not."""
    sender, receiver = await tcp_pair(patience=60)
    receiver.lose = 1
    task = asyncio.create_task(sender.send(receiver, np.zeros(PIECE, np.uint8)))
    await until(lambda: bool(receiver.headers))
    link_of(receiver, S).abort()
    with pytest.raises(LaneBroken):
        await task
    await close(sender, receiver)


async def test_a_receiver_that_reads_slowly_is_waited_for() -> None:
    """Longer than one that reads nothing: a piece may take its time as long as some of it leaves."""
    sender, receiver = await tcp_pair(patience=0.25)
    incoming = link_of(receiver, S)._transport
    assert incoming is not None
    loop = asyncio.get_running_loop()
    began, task = loop.time(), asyncio.create_task(sender.send(receiver, np.ones(64 << 20, np.uint8)))
    while not task.done():
        incoming.pause_reading()
        await asyncio.wait([task], timeout=0.1)
        incoming.resume_reading()
        for _ in range(3):
            await asyncio.sleep(0)
    await task
    assert loop.time() - began > 1.5 * 0.25 * STALLED
    assert (receiver.got[0][1] == 1).all()
    await close(sender, receiver)


async def test_a_receiver_that_is_gone_ends_what_is_under_way_however_patient() -> None:
    """While bytes wait for room, and after all have left; half received ones are let go at the other side."""
    sender, receiver = await tcp_pair(patience=60)
    receiver.lose = 1 << 30
    left = asyncio.create_task(sender.send_in_turn(receiver, np.ones(PIECE, np.uint8)))
    await until(lambda: bool(receiver.headers))
    incoming = link_of(receiver, S)._transport
    assert incoming is not None
    incoming.pause_reading()
    leaving = asyncio.create_task(sender.send_in_turn(receiver, np.ones(64 << 20, np.uint8)))
    await until(lambda: len(receiver.headers) == 2 and not link_of(sender, R)._room.is_set())
    sender.lane.release(R)
    async with asyncio.timeout(5):
        with pytest.raises(WorldError, match="takes no part any more"):
            await left
        with pytest.raises(LaneBroken):
            await leaving
    incoming.resume_reading()
    await until(lambda: not any(lane_of(receiver)._incoming.values()))
    receiver.lose = 0
    await lane_of(sender).met(R)
    await sender.send(receiver, np.full(PIECE, 2, np.uint8))
    assert [int(array[0]) for _, array in receiver.got] == [2]
    await close(sender, receiver)


async def test_a_receiver_that_reads_nothing_for_long_is_given_up() -> None:
    """A stopped process keeps its connections."""
    sender, receiver = await tcp_pair(patience=0.02)
    incoming = link_of(receiver, S)._transport
    assert incoming is not None
    incoming.pause_reading()
    with pytest.raises(LaneBroken, match=r"has taken nothing for 0\.08 s"):
        await sender.send(receiver, np.zeros(64 << 20, np.uint8))
    await close(sender, receiver)


async def test_a_receiver_that_never_gets_the_header_fails_the_transfer_and_forgets_it() -> None:
    """After some repetitions; the connection stays."""
    sender, receiver = await tcp_pair(patience=0.01)
    receiver.lose = 100
    with pytest.raises(WorldError, match="r does not take tensors"):
        await sender.send(receiver, np.zeros(PIECE, np.uint8))
    await until(lambda: not any(lane_of(receiver)._incoming.values()))
    receiver.lose = 0
    await sender.send(receiver, np.ones(PIECE, np.uint8))
    assert (receiver.got[0][1] == 1).all()
    await close(sender, receiver)


async def test_a_cancelled_sender_leaves_nothing_behind() -> None:
    """While its bytes wait for room, and after all have left."""
    sender, receiver = await tcp_pair(patience=60)
    incoming = link_of(receiver, S)._transport
    assert incoming is not None
    incoming.pause_reading()
    task = asyncio.create_task(sender.send(receiver, np.zeros(64 << 20, np.uint8)))
    await until(lambda: bool(receiver.headers) and not link_of(sender, R)._room.is_set())
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    incoming.resume_reading()
    await lane_of(sender).met(R)
    await until(lambda: not any(lane_of(receiver)._incoming.values()))

    receiver.lose = 1
    hop = hop_for(np.zeros(PIECE, np.uint8), sender.port.next_transfer(), S)
    arrived = await sender.lane.send(R, hop, np.zeros(PIECE, np.uint8))
    arrived.cancel()
    await until(lambda: not lane_of(sender)._outgoing)
    await until(lambda: not any(lane_of(receiver)._incoming.values()))
    await sender.send(receiver, np.ones(PIECE, np.uint8))
    assert [int(array[0]) for _, array in receiver.got] == [1]
    await close(sender, receiver)


@pytest.mark.parametrize(
    "frame",
    [
        _HEAD.pack(9, 0, 1, 0, 0),
        _HEAD.pack(1, 0, 1, 0, 0),
        _HEAD.pack(1, PIECE + 1, 1, 0, 4 * PIECE),
        _HEAD.pack(1, 64, 1, 64, 100),
        _HEAD.pack(1, 64, 1, 1 << 62, 1 << 63),
        _HEAD.pack(1, 64, 1, 64, 1 << 20),
        _HEAD.pack(1, 64, 1, 0, 1 << 50),
        _HEAD.pack(4, 0, 1, 0, 0) + b"noise" * 100,
    ],
)
async def test_bytes_that_break_the_protocol_end_the_connection_and_are_counted(frame: bytes) -> None:
    """Unknown kinds, lengths that lie, gaps, tensors beyond the limit; then a new connection is made."""
    sender, receiver = await tcp_pair()
    outgoing = link_of(sender, R)
    assert outgoing._transport is not None
    outgoing._transport.write(frame)
    await until(lambda: receiver.port.dropped["frame"] == 1)
    await outgoing.ended
    await lane_of(sender).met(R)
    await sender.send(receiver, np.ones(PIECE, np.uint8))
    assert len(receiver.got) == 1
    await close(sender, receiver)


async def test_what_may_be_half_received_is_bounded() -> None:
    """Headers without bytes push out the oldest; begun transfers end the connection."""
    sender, receiver = await tcp_pair()
    hop = replace(hop_for(np.zeros(PIECE, np.uint8), 0, S), lane="tcp")
    for number in range(UNDER_WAY + 5):
        receiver.lane.on_header(replace(hop, transfer=number), memoryview(b""))
    assert len(lane_of(receiver)._incoming[S]) == UNDER_WAY
    outgoing = link_of(sender, R)
    assert outgoing._transport is not None
    for number in range(UNDER_WAY + 1):
        outgoing._transport.write(_HEAD.pack(1, 1, 10_000 + number, 0, 2) + b"x")
    await until(lambda: receiver.port.dropped["frame"] == 1)
    await close(sender, receiver)


async def test_a_header_of_another_size_than_the_bytes_is_dropped() -> None:
    """The bytes wait for the right one."""
    sender, receiver = await tcp_pair(patience=60)
    receiver.lose = 1
    task = asyncio.create_task(sender.send(receiver, np.ones(PIECE, np.uint8)))
    await until(lambda: bool(receiver.headers) and any(lane_of(receiver)._incoming.values()))
    hop, _ = codec.decode_with_payload(receiver.headers[0])
    assert isinstance(hop, Hop)
    receiver.hear(codec.encode_with_payload(replace(hop, shape=(5,), nbytes=5), b""))
    assert receiver.port.dropped["hop"] == 1
    receiver.hear(receiver.headers[0])
    await task
    await close(sender, receiver)


async def test_bytes_for_a_node_that_left_go_nowhere() -> None:
    """And the connection goes on."""
    sender, receiver = await tcp_pair(patience=60)
    incoming = link_of(receiver, S)._transport
    assert incoming is not None
    incoming.pause_reading()
    task = asyncio.create_task(sender.send(receiver, np.zeros(64 << 20, np.uint8)))
    await until(lambda: bool(receiver.headers) and not link_of(sender, R)._room.is_set())
    lane_of(receiver).forget(NETWORK, {NodeId("other")})
    assert lane_of(receiver)._incoming[S]
    lane_of(receiver).forget(NETWORK, {TARGET})
    incoming.resume_reading()
    await sender.send(receiver, np.ones(PIECE, np.uint8))
    assert [int(array[0]) for _, array in receiver.got] == [1]
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await close(sender, receiver)


async def test_close_fails_what_is_under_way() -> None:
    """So nobody waits for ever."""
    sender, receiver = await tcp_pair(patience=60)
    receiver.lose = 10
    array = np.zeros(20 << 20, np.uint8)
    tasks = [asyncio.create_task(sender.send(receiver, array)) for _ in range(3)]
    await until(lambda: len(receiver.headers) == 2)
    await sender.close()
    assert all(isinstance(result, WorldError | LaneBroken) for result in await asyncio.gather(*tasks, return_exceptions=True))
    await receiver.close()


async def test_strangers_get_nothing() -> None:
    """A program that speaks something else, and one that says nothing until the end."""
    sender, receiver = await tcp_pair()
    meeting = lane_of(receiver)._rendezvous
    assert meeting is not None
    host, port = meeting._addresses()[0]
    with socket.create_connection((host, port)) as silent:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET / HTTP/1.1\r\n" * 10)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        await until(lambda: receiver.port.dropped["handshake"] == 1)
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.recv(1)
    await close(sender, receiver)
