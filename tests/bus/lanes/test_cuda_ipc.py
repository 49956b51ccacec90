"""From device to device: the common cases on a device of host memory, and every way in which the other side can fail."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import ClassVar, cast

import numpy as np
import pytest

from dcnr.bus import codec, subjects
from dcnr.bus.lanes.base import Bytes, DeviceBuffer, DeviceSide, LaneBroken, Port
from dcnr.bus.lanes.cuda_ipc import MIN_RING, CudaIpcLane
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import Credit, Hop
from dcnr.errors import WorldError
from dcnr.ids import PNodeId
from tests.bus.contract import until
from tests.bus.lanes.contract import AcknowledgedLaneContract, End, Pair, hop_for, make_end
from tests.bus.lanes.devices import FakeBuffer, FakeHost, FakePort

S, R = PNodeId("s"), PNodeId("r")
MIB = 1 << 20


class FromHost:
    """The lane as the contract wants it: arrays that are first put on the device."""

    name: ClassVar[str] = "cuda"

    def __init__(self, port: Port, device: FakePort, patience: float) -> None:
        def on_hop(hop: Hop, buffer: DeviceBuffer) -> None:
            port.deliver(hop, cast("FakeBuffer", buffer).array.reshape(-1).view(np.uint8))

        self.device = device
        self.lane = CudaIpcLane(port, DeviceSide(device, on_hop), patience)

    async def start(self) -> None:
        """Nothing to prepare."""

    def serves(self, to: PNodeId, nbytes: int) -> bool:
        """As the lane says."""
        return self.lane.serves(to)

    async def send(self, to: PNodeId, hop: Hop, data: Bytes) -> asyncio.Future[None]:
        """From a device that holds a copy."""
        return await self.lane.send(to, hop, FakeBuffer(data.copy()))

    def on_header(self, hop: Hop, payload: memoryview) -> None:
        """The lane's."""
        self.lane.on_header(hop, payload)

    def on_credit(self, credit: Credit) -> None:
        """The lane's."""
        self.lane.on_credit(credit)

    def release(self, peer: PNodeId) -> None:
        """The lane's."""
        self.lane.release(peer)

    async def close(self) -> None:
        """The lane's."""
        await self.lane.close()


def lane_of(end: End) -> FromHost:
    """With its type."""
    assert isinstance(end.lane, FromHost)
    return end.lane


async def cuda_pair(patience: float = 0.05) -> tuple[End, End]:
    """Sender and receiver on one host."""
    broker, host = MemoryBroker(), FakeHost()
    sender = await make_end(broker, S, lambda port: FromHost(port, FakePort(host), patience))
    receiver = await make_end(broker, R, lambda port: FromHost(port, FakePort(host), patience))
    await sender.bus.subscribe(subjects.peer(S, "credit"), sender.hear_credit)
    await receiver.open()
    lane_of(sender).lane.set_near({R})
    return sender, receiver


async def close(*ends: End) -> None:
    """All of them."""
    for end in ends:
        await end.close()
        device = lane_of(end).device
        assert device.opened == []
    assert lane_of(ends[0]).device.host.staged == {}


class TestCudaIpc(AcknowledgedLaneContract):
    """The common cases."""

    sizes = (1, 4097, 300_001)

    @pytest.fixture
    def pair(self) -> Pair:
        """Sender and receiver."""
        return lambda: cuda_pair(0.25)

    async def begin_anew(self, sender: End, receiver: End) -> None:
        """A slot whose fate is unknown ends the lane until the peer was started anew."""
        for end, peer in ((sender, R), (receiver, S)):
            end.lane.release(peer)


async def test_it_serves_peers_of_the_host_that_have_a_device() -> None:
    """Nobody else."""
    sender, receiver = await cuda_pair()
    assert lane_of(sender).lane.serves(R)
    assert not lane_of(sender).lane.serves(PNodeId("other"))
    await close(sender, receiver)


async def test_the_ring_grows_with_the_tensors_and_the_old_one_is_given_back() -> None:
    """One at a time, opened once."""
    sender, receiver = await cuda_pair(5)
    for size in (1000, MIN_RING // 2, 1000, 2 * MIN_RING, MIB):
        await sender.send(receiver, np.full(size, 3, np.uint8))
        assert len(lane_of(sender).device.host.staged) == 1
        assert len(lane_of(receiver).device.opened) == 1
    assert all((array == 3).all() for _, array in receiver.got)
    await close(sender, receiver)


async def test_more_than_the_ring_holds_waits_for_credits() -> None:
    """And all of it arrives, in order."""
    sender, receiver = await cuda_pair(5)
    array = np.zeros(MIN_RING // 3, np.uint8)
    lock = asyncio.Lock()

    async def send(number: int) -> None:
        hop = replace(hop_for(array, sender.port.next_transfer(), S), micro=number)
        async with lock:
            arrived = await sender.lane.send(R, hop, array)
        await arrived

    await asyncio.gather(*(send(number) for number in range(9)))
    assert [hop.micro for hop, _ in receiver.got] == list(range(9))
    await close(sender, receiver)


@pytest.mark.parametrize("what", ["open", "copy"])
async def test_a_receiver_that_cannot_read_our_memory_refuses(what: str) -> None:
    """Containers, or devices without a way to each other; the transport then takes another lane."""
    sender, receiver = await cuda_pair(5)
    lane_of(receiver).device.broken.add(what)
    with pytest.raises(LaneBroken, match="cannot open memory of our device"):
        await sender.send(receiver, np.zeros(MIB, np.uint8))
    assert not lane_of(sender).lane.serves(R)
    assert receiver.got == []
    await close(sender, receiver)


@pytest.mark.parametrize("what", ["stage", "copy"])
async def test_a_sender_whose_device_refuses_gives_the_lane_up(what: str) -> None:
    """Nothing was announced."""
    sender, receiver = await cuda_pair(5)
    lane_of(sender).device.broken.add(what)
    with pytest.raises(LaneBroken, match=f"the device does not {what}"):
        await sender.send(receiver, np.zeros(MIB, np.uint8))
    assert receiver.headers == []
    await close(sender, receiver)


async def test_a_slot_whose_fate_is_unknown_is_never_used_again() -> None:
    """The lane is given up until the receiver was started anew; a late header still finds its own tensor."""
    sender, receiver = await cuda_pair(0.01)
    receiver.lose = 100
    with pytest.raises(WorldError, match="r does not take tensors"):
        await sender.send(receiver, np.full(MIB, 5, np.uint8))
    assert not lane_of(sender).lane.serves(R)
    receiver.lose = 0
    receiver.hear(receiver.headers[0])
    await until(lambda: bool(receiver.got))
    assert (receiver.got[0][1] == 5).all()
    lane_of(sender).lane.release(R)
    assert lane_of(sender).lane.serves(R)
    await sender.send(receiver, np.full(MIB, 6, np.uint8))
    assert (receiver.got[1][1] == 6).all()
    await close(sender, receiver)


async def test_whoever_waits_for_room_of_a_lane_that_is_given_up_learns_it() -> None:
    """It goes another way."""
    sender, receiver = await cuda_pair(0.02)
    receiver.lose = 100
    array = np.zeros(MIN_RING // 2, np.uint8)
    hops = [hop_for(array, sender.port.next_transfer(), S) for _ in range(2)]
    first = [await sender.lane.send(R, hop, array) for hop in hops]
    with pytest.raises(LaneBroken, match="not reached from device to device any more"):
        await sender.send(receiver, array)
    assert all(isinstance(result, WorldError) for result in await asyncio.gather(*first, return_exceptions=True))
    await close(sender, receiver)


@pytest.mark.parametrize("lane", ["cuda", "cuda:00:0", "cuda:HANDLE:x", "cuda:HANDLE:-1", "cuda:zz:0", "cuda:" + "zz" * 64 + ":0"])
async def test_headers_that_name_no_place_are_dropped(lane: str) -> None:
    """Before the device hears of them."""
    sender, receiver = await cuda_pair(5)
    await sender.send(receiver, np.ones(MIB, np.uint8))
    hop, _ = codec.decode_with_payload(receiver.headers[0])
    assert isinstance(hop, Hop)
    handle = hop.lane.split(":")[1]
    receiver.hear(codec.encode_with_payload(replace(hop, transfer=hop.transfer + 1, lane=lane.replace("HANDLE", handle)), b""))
    assert receiver.port.dropped["hop"] == 1
    assert len(receiver.got) == 1
    await close(sender, receiver)


async def test_a_header_that_comes_again_during_the_copy_changes_nothing() -> None:
    """One copy, one tensor, one credit."""
    sender, receiver = await cuda_pair(5)
    task = asyncio.create_task(sender.send(receiver, np.ones(MIB, np.uint8)))
    await until(lambda: bool(receiver.headers))
    for _ in range(3):
        receiver.hear(receiver.headers[0])
    await task
    assert len(receiver.got) == 1
    await close(sender, receiver)


async def test_a_cancelled_sender_does_not_lose_the_slot() -> None:
    """It comes back with the credit."""
    sender, receiver = await cuda_pair(60)
    receiver.lose = 1
    task = asyncio.create_task(sender.send(receiver, np.ones(MIB, np.uint8)))
    await until(lambda: bool(receiver.headers))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    receiver.hear(receiver.headers[0])
    await until(lambda: len(lane_of(sender).lane._stagings[R].ring) == 0)
    await close(sender, receiver)


async def test_credits_of_other_transfers_are_nothing_to_it() -> None:
    """Every lane hears every credit."""
    sender, receiver = await cuda_pair(5)
    sender.lane.on_credit(Credit(R, 1, 1))
    await close(sender, receiver)
