"""Tensors through shared memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dcnr.bus import codec, subjects
from dcnr.bus.lanes import lending, segment, shm
from dcnr.bus.lanes.base import LaneBroken
from dcnr.bus.lanes.lending import LEND_FROM
from dcnr.bus.lanes.pool import Pool
from dcnr.bus.lanes.shm import MIN_RING, SHM_FROM, ShmLane
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import Hop
from dcnr.errors import WorldError
from dcnr.ids import PNodeId
from tests.bus.contract import until
from tests.bus.lanes.contract import AcknowledgedLaneContract, End, Pair, make_end

R = PNodeId("r")


@pytest.fixture(autouse=True)
def own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Tests do not touch segments of running clusters."""
    monkeypatch.setattr(segment, "directory", lambda: tmp_path)
    return tmp_path


async def shm_pair(patience: float = 0.05) -> tuple[End, End]:
    """Sender and receiver on one host."""
    broker = MemoryBroker()
    sender = await make_end(broker, "s", lambda port: ShmLane(port, Pool(), "host", patience))
    receiver = await make_end(broker, "r", lambda port: ShmLane(port, Pool(), "host", patience))
    await sender.lane.start()
    await sender.bus.subscribe(subjects.peer(sender.port.me, "credit"), sender.hear_credit)
    await receiver.open()
    return sender, receiver


class TestShm(AcknowledgedLaneContract):
    """The common cases; the sizes fill the ring several times."""

    sizes = (1, 4097, 300_001)

    @pytest.fixture
    def pair(self) -> Pair:
        """Sender and receiver."""
        return shm_pair


async def test_it_serves_large_tensors_to_the_same_host() -> None:
    """And nobody it knows nothing of."""
    sender, receiver = await shm_pair()
    lane = sender.lane
    assert isinstance(lane, ShmLane)
    lane.set_hosts({R: "host", PNodeId("far"): "other"})
    assert lane.serves(R, SHM_FROM)
    assert not lane.serves(R, SHM_FROM - 1)
    assert not lane.serves(PNodeId("far"), SHM_FROM)
    assert not lane.serves(PNodeId("unknown"), SHM_FROM)
    await sender.close()
    await receiver.close()


async def test_the_ring_grows_with_the_tensors_and_nothing_is_left_behind(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is lent: one segment at a time per receiver."""
    monkeypatch.setattr(shm, "LEND_FROM", 1 << 40)
    sender, receiver = await shm_pair()
    for size in (1000, MIN_RING, 1000, 3 * MIN_RING):
        await sender.send(receiver, np.full(size, 3, np.uint8))
        assert len(list(own_directory.iterdir())) == 1
    assert all((array == 3).all() for _, array in receiver.got)
    await sender.close()
    await receiver.close()
    assert list(own_directory.iterdir()) == []


async def test_without_room_the_lane_is_given_up_for_that_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport then takes the next one."""
    sender, receiver = await shm_pair()
    lane = sender.lane
    assert isinstance(lane, ShmLane)
    lane.set_hosts({R: "host"})

    def no_room(size: int, share: int = segment.SHARE) -> segment.Segment:
        raise OSError("no room")

    monkeypatch.setattr(segment, "create", no_room)
    with pytest.raises(LaneBroken, match="no room"):
        await sender.send(receiver, np.zeros(SHM_FROM, np.uint8))
    assert not lane.serves(R, SHM_FROM)
    await sender.close()
    await receiver.close()


async def test_a_receiver_that_cannot_open_the_segment_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal host names do not prove shared memory: containers."""
    sender, receiver = await shm_pair()

    def closed(name: str, control: int = 0) -> segment.Segment:
        raise FileNotFoundError(name)

    monkeypatch.setattr(segment, "attach", closed)
    with pytest.raises(LaneBroken, match="cannot open"):
        await sender.send(receiver, np.zeros(SHM_FROM, np.uint8))
    assert receiver.got == []
    await sender.close()
    await receiver.close()


async def test_a_receiver_that_says_nothing_fails_the_transfer_and_its_slot_is_used_again() -> None:
    """A header that comes after that finds nothing."""
    sender, receiver = await shm_pair(patience=0.01)
    receiver.lose = 100
    with pytest.raises(WorldError, match="r does not take tensors"):
        await sender.send(receiver, np.ones(SHM_FROM, np.uint8))
    receiver.lose = 0
    receiver.hear(receiver.headers[0])
    assert receiver.got == []
    assert receiver.port.dropped["hop"] == 1
    await sender.send(receiver, np.full(SHM_FROM, 2, np.uint8))
    assert (receiver.got[0][1] == 2).all()
    await sender.close()
    await receiver.close()


def shelf_of(end: End) -> lending.Shelf:
    """What the sender may lend."""
    assert isinstance(end.lane, ShmLane)
    return end.lane._shelves[R]


async def test_a_large_tensor_lies_where_the_sender_put_it_until_the_last_view_is_gone() -> None:
    """The receiver cannot write to it; then the segment is lent again, and no second one is made."""
    sender, receiver = await shm_pair()
    for number in range(4):
        await sender.send(receiver, np.full(LEND_FROM, number, np.uint8))
        hop, array = receiver.got.pop()
        assert len(hop.lane.split(":")) == 2
        assert not array.flags.writeable
        view = array.reshape(-1, 2)[5:, 1].view(np.int8)
        del array
        assert (view == number).all()
        assert shelf_of(sender).find(LEND_FROM) is None
        del view
        assert shelf_of(sender).find(LEND_FROM) is not None
        assert len(shelf_of(sender)) == 1
    await sender.close()
    await receiver.close()


async def test_what_a_receiver_holds_is_bounded_and_never_stops_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit, the ring carries them, however long the others are kept."""
    monkeypatch.setattr(lending.Shelf.__init__, "__defaults__", (2 * lending.size_for(LEND_FROM),))
    sender, receiver = await shm_pair()
    for number in range(12):
        await sender.send(receiver, np.full(LEND_FROM, number, np.uint8))
    places = [len(hop.lane.split(":")) for hop, _ in receiver.got]
    assert places == [2, 2, *[3] * 10]
    assert all((array == number).all() for number, (_, array) in enumerate(receiver.got))
    receiver.got.clear()
    await sender.send(receiver, np.full(LEND_FROM, 7, np.uint8))
    assert len(receiver.got[0][0].lane.split(":")) == 2
    await sender.close()
    await receiver.close()


async def test_a_borrowed_tensor_outlives_the_lanes(own_directory: Path) -> None:
    """Also the sender's; and nothing is left behind."""
    sender, receiver = await shm_pair()
    await sender.send(receiver, np.full(LEND_FROM, 9, np.uint8))
    _, array = receiver.got.pop()
    await sender.close()
    await receiver.close()
    assert list(own_directory.iterdir()) == []
    assert (array == 9).all()


async def test_a_segment_that_nobody_acknowledged_is_never_lent_again() -> None:
    """The receiver may have it or not."""
    sender, receiver = await shm_pair(patience=0.01)
    receiver.lose = 100
    with pytest.raises(WorldError, match="r does not take tensors"):
        await sender.send(receiver, np.ones(LEND_FROM, np.uint8))
    assert len(shelf_of(sender)) == 0
    receiver.lose = 0
    receiver.hear(receiver.headers[0])
    assert receiver.got == []
    await sender.send(receiver, np.full(LEND_FROM, 2, np.uint8))
    assert (receiver.got[-1][1] == 2).all()
    await sender.close()
    await receiver.close()


@pytest.mark.parametrize("size", [SHM_FROM, LEND_FROM])
async def test_a_receiver_that_is_gone_fails_what_is_under_way_and_the_lane_works_for_the_next(own_directory: Path, size: int) -> None:
    """At once, also what waits for room; a late header finds nothing; whoever bears the name then gets its tensors."""
    sender, receiver = await shm_pair(patience=60)
    receiver.lose = 1
    lane = sender.lane
    assert isinstance(lane, ShmLane)
    lane.set_hosts({R: "host"})
    task = asyncio.create_task(sender.send(receiver, np.ones(size, np.uint8)))
    await until(lambda: bool(receiver.headers))
    waiting = asyncio.create_task(sender.send(receiver, np.ones(3 * MIN_RING, np.uint8))) if size == SHM_FROM else None
    await asyncio.sleep(0)
    lane.release(R)
    with pytest.raises(WorldError, match="takes no part any more"):
        await task
    assert [path for path in own_directory.iterdir() if waiting is None] == []
    receiver.hear(receiver.headers[0])
    assert receiver.got == []
    if waiting is not None:
        with pytest.raises(WorldError, match="takes no part any more"):
            await waiting
    assert lane.serves(R, LEND_FROM)
    await sender.send(receiver, np.full(size, 2, np.uint8))
    assert (receiver.got[-1][1] == 2).all()
    await sender.close()
    await receiver.close()
    assert list(own_directory.iterdir()) == []


async def test_whoever_waits_for_room_of_a_receiver_that_is_gone_learns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of waiting for a credit that never comes."""
    monkeypatch.setattr(shm, "LEND_FROM", 1 << 40)
    sender, receiver = await shm_pair(patience=60)
    receiver.lose = 100
    sends = [asyncio.create_task(sender.send(receiver, np.ones(MIN_RING // 3, np.uint8))) for _ in range(2)]
    await until(lambda: len(receiver.headers) == 2)
    sends.append(asyncio.create_task(sender.send(receiver, np.ones(MIN_RING // 3, np.uint8))))
    for _ in range(3):
        await asyncio.sleep(0)
    sender.lane.release(R)
    results = await asyncio.gather(*sends, return_exceptions=True)
    assert [str(result) for result in results] == ["r takes no part any more"] * 3
    await sender.close()
    await receiver.close()


async def test_segments_of_a_peer_that_left_are_let_go(own_directory: Path) -> None:
    """Whatever it still holds; the receiver lets go of its mappings when it sees that."""
    sender, receiver = await shm_pair()
    await sender.send(receiver, np.ones(LEND_FROM, np.uint8))
    lane, other = sender.lane, receiver.lane
    assert isinstance(lane, ShmLane)
    assert isinstance(other, ShmLane)
    lane.release(R)
    assert list(own_directory.iterdir()) == []
    await sender.send(receiver, np.full(LEND_FROM, 2, np.uint8))
    assert [int(array[0]) for _, array in receiver.got] == [1, 2]
    assert len(other._borrowed[PNodeId("s")]) == 1
    await sender.close()
    await receiver.close()


@pytest.mark.parametrize("lane", ["shm", "shm:x:0", "shm:dcnr-1-0000000a:x", "shm:NAME:999999999", "shm:NAME:-64"])
async def test_headers_that_lie_about_the_place_are_dropped(lane: str) -> None:
    """Nothing outside the segment is read."""
    sender, receiver = await shm_pair()
    await sender.send(receiver, np.ones(SHM_FROM, np.uint8))
    hop, _ = codec.decode_with_payload(receiver.headers[0])
    assert isinstance(hop, Hop)
    name = hop.lane.split(":")[1]
    receiver.hear(codec.encode_with_payload(replace(hop, transfer=hop.transfer + 1, lane=lane.replace("NAME", name)), b""))
    assert len(receiver.got) == 1
    assert receiver.port.dropped["hop"] == 1
    await sender.close()
    await receiver.close()


async def test_a_cancelled_sender_does_not_lose_the_slot() -> None:
    """It comes back with the credit."""
    sender, receiver = await shm_pair(patience=60)
    receiver.lose = 1
    task = asyncio.create_task(sender.send(receiver, np.ones(SHM_FROM, np.uint8)))
    await until(lambda: bool(receiver.headers))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    receiver.hear(receiver.headers[0])
    lane = sender.lane
    assert isinstance(lane, ShmLane)
    await until(lambda: len(lane._outboxes[R].ring) == 0)
    await sender.close()
    await receiver.close()
