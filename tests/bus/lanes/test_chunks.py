"""Tensors in chunks over the bus."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np
import pytest

from dcnr.bus import codec, subjects
from dcnr.bus.lanes.chunks import ChunksLane
from dcnr.bus.lanes.pool import Pool
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import Chunk
from dcnr.errors import WorldError
from dcnr.ids import PNodeId
from tests.bus.contract import until
from tests.bus.lanes.contract import AcknowledgedLaneContract, End, Pair, make_end
from tests.bus.lanes.weather import cut

MIB = 1 << 20
S, R = PNodeId("s"), PNodeId("r")


async def chunks_pair(broker: MemoryBroker, patience: float = 0.05) -> tuple[End, End]:
    """Sender and receiver on one broker."""
    sender = await make_end(broker, "s", lambda port: ChunksLane(port, Pool(), patience))
    receiver = await make_end(broker, "r", lambda port: ChunksLane(port, Pool(), patience))
    await sender.lane.start()
    await sender.bus.subscribe(subjects.peer(sender.port.me, "credit"), sender.hear_credit)
    await receiver.open()
    return sender, receiver


class TestChunks(AcknowledgedLaneContract):
    """The common cases with messages of 64 KB, so that sizes need many chunks."""

    sizes = (1, 4097, 300_001)

    @pytest.fixture
    def pair(self) -> Pair:
        """Sender and receiver on a broker of their own."""
        return lambda: chunks_pair(MemoryBroker(64 << 10))


async def test_no_more_than_the_window_is_under_way() -> None:
    """4 MiB to a receiver that says nothing; `send` does not return before the rest has left."""
    broker = MemoryBroker()
    sender = await make_end(broker, "s", lambda port: ChunksLane(port, Pool(), 60))
    heard: list[bytes] = []
    await sender.bus.subscribe(subjects.peer(PNodeId("r"), "chunk"), heard.append)
    receiver = await make_end(broker, "r", lambda port: ChunksLane(port, Pool(), 60))
    task = asyncio.create_task(sender.send(receiver, np.zeros(10 * MIB, np.uint8)))
    await until(lambda: len(heard) == 8)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(heard) == 8
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    for end in (sender, receiver):
        await end.close()


async def test_a_slow_link_is_no_failure() -> None:
    """64 MiB at 1 MB/s with a patience of 2 s, forty times as fast: it moves, so nothing fails, and little is sent twice."""
    sender, receiver = await chunks_pair(MemoryBroker(), patience=0.05)
    loop, free, carried = asyncio.get_running_loop(), 0.0, 0

    def link(origin: str, to: str, subject: str, data: bytes) -> tuple[float, ...]:
        nonlocal free, carried
        if (origin, to) != ("s", "r"):
            return (0.0,)
        free, carried = max(free, loop.time()) + len(data) / 40e6, carried + len(data)
        return (free - loop.time(),)

    sender.broker.fate = link
    began = loop.time()
    await sender.send(receiver, np.ones(64 * MIB, np.uint8))
    assert loop.time() - began > 1.5
    assert carried < 1.5 * 64 * MIB
    assert (receiver.got[0][1] == 1).all()
    for end in (sender, receiver):
        await end.close()


async def test_a_receiver_that_is_gone_ends_what_is_under_way_however_patient() -> None:
    """What waits for the window too; half received ones are let go at the other side."""
    sender, receiver = await chunks_pair(MemoryBroker(), patience=60)
    sender.broker.fate = cut("r", "s")
    sends = [asyncio.create_task(sender.send_in_turn(receiver, np.ones(20 * MIB, np.uint8))) for _ in range(2)]
    lane = receiver.lane
    assert isinstance(lane, ChunksLane)
    await until(lambda: bool(lane._buffers))
    sender.lane.release(R)
    async with asyncio.timeout(5):
        with pytest.raises(WorldError, match="takes no part any more"):
            await sends[0]
    sends[1].cancel()
    await asyncio.gather(*sends, return_exceptions=True)
    lane.release(S)
    assert lane._buffers == {}
    sender.broker.fate = None
    await sender.send(receiver, np.ones(MIB, np.uint8))
    assert [array.nbytes for _, array in receiver.got] == [MIB]
    for end in (sender, receiver):
        await end.close()


async def test_a_receiver_that_says_nothing_fails_the_transfer() -> None:
    """After a few rounds, with a reason; the next transfer has its own chance."""
    broker = MemoryBroker()
    sender, receiver = await chunks_pair(broker, patience=0.01)
    await receiver.close()
    with pytest.raises(WorldError, match="r does not take tensors"):
        await sender.send(receiver, np.zeros(MIB, np.uint8))
    await sender.close()


async def test_a_transfer_that_was_given_up_does_not_block_the_next() -> None:
    """Its sender was cancelled while the window was full."""
    sender, receiver = await chunks_pair(MemoryBroker(), patience=60)
    task = asyncio.create_task(sender.send(receiver, np.zeros(20 * MIB, np.uint8)))
    await until(lambda: bool(receiver.headers))
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await sender.send(receiver, np.ones(MIB, np.uint8))
    assert [array.nbytes for _, array in receiver.got] == [MIB]
    for end in (sender, receiver):
        await end.close()


async def test_bad_chunks_are_dropped_and_counted() -> None:
    """Noise, another message, bytes beyond the end."""
    sender, receiver = await chunks_pair(MemoryBroker())
    subject = subjects.peer(receiver.port.me, "chunk")
    for data in (
        b"noise",
        codec.encode_with_payload(Chunk(PNodeId("s"), 1, 90, 100), bytes(11)),
        codec.encode_with_payload(Chunk(PNodeId("s"), 1, 0, 1 << 50), bytes(11)),
        receiver.headers[0] if receiver.headers else b"",
    ):
        await sender.bus.publish(subject, data)
    await until(lambda: receiver.port.dropped.total() == 4)
    assert receiver.got == []
    for end in (sender, receiver):
        await end.close()


async def test_close_fails_what_is_under_way() -> None:
    """So nobody waits for ever."""
    sender, receiver = await chunks_pair(MemoryBroker(), patience=60)
    receiver.lose = 1
    task = asyncio.create_task(sender.send(receiver, np.zeros(MIB, np.uint8)))
    await until(lambda: bool(receiver.headers))
    await sender.close()
    with pytest.raises(WorldError, match="given up"):
        await task
    await receiver.close()
