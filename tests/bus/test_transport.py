"""Hops between transports: over the right lane, once, in order, and whatever comes from outside is survived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from dcnr.bus import codec, subjects, wire
from dcnr.bus.base import Bus
from dcnr.bus.lanes import segment
from dcnr.bus.lanes.base import Array, DeviceBuffer, DeviceSide
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import Chunk, Credit, Hop, PNodeInfo
from dcnr.bus.nats import connect
from dcnr.bus.server import NatsServer
from dcnr.bus.transport import HopTransport
from dcnr.errors import InvariantError, WorldError
from dcnr.ids import Epoch, NetworkId, NodeId, PNodeId, SessionId
from tests.bus.contract import until
from tests.bus.lanes.devices import FakeBuffer, FakeHost, FakePort

NET, A, B, NODE = NetworkId("net"), PNodeId("a"), PNodeId("b"), NodeId("n")
HOP = Hop(NET, SessionId("s"), Epoch(1), 1, 0, 0, "fwd", NodeId("src"), 0, ((NODE, 0),), PNodeId("unset"), "", ())
Got = list[tuple[Hop, Array]]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Tests do not touch segments of running clusters."""
    where = tmp_path / "shm"
    where.mkdir()
    monkeypatch.setattr(segment, "directory", lambda: where)
    return where


def info(pnode: PNodeId, host: str) -> PNodeInfo:
    """A peer on `host`."""
    return PNodeInfo(pnode, "1", host, "cpu", "cpu", 0, 0, 1, 0, "0")


class Pair:
    """`a` sends, `b` hosts `NODE`. Where `direct` lets them connect, that takes a moment, so most tests do without."""

    def __init__(self, buses: tuple[Bus, Bus], hosts: tuple[str, str], direct: bool = False) -> None:
        self.got: Got = []
        self.buses = buses
        self.a = HopTransport(buses[0], A, hosts[0], lambda *_: None, direct)
        self.b = HopTransport(buses[1], B, hosts[1], lambda hop, array: self.got.append((hop, array)), direct)
        self.a.set_peers([info(A, hosts[0]), info(B, hosts[1])])
        self.b.set_peers([info(A, hosts[0]), info(B, hosts[1])])

    async def close(self) -> None:
        """Both transports and their buses."""
        for transport, bus in zip((self.a, self.b), self.buses, strict=True):
            await transport.close()
            await bus.close()


MakePair = Callable[[str], Awaitable[Pair]]


@pytest.fixture(params=["memory", "nats 1 MB", "nats 64 KB"])
async def make(request: pytest.FixtureRequest, tmp_path: Path, nats_url: str) -> AsyncIterator[MakePair]:
    """Makes a pair on each kind of bus; `b` is on the host that is named, `a` on `here`."""
    pairs: list[Pair] = []
    broker = MemoryBroker()
    small = NatsServer(tmp_path / "nats", max_payload=64 << 10)
    if request.param == "nats 64 KB":
        await small.start()

    async def bus(name: str) -> Bus:
        if request.param == "memory":
            return broker.connect()
        return await connect(nats_url if request.param == "nats 1 MB" else small.url, name)

    async def make(host: str) -> Pair:
        pairs.append(Pair((await bus("a"), await bus("b")), ("here", host)))
        await pairs[-1].b.listen(NET, [NODE])
        return pairs[-1]

    yield make
    for pair in pairs:
        await pair.close()
    await small.stop()


async def send_all(pair: Pair, arrays: list[Array]) -> None:
    """All at once, numbered by micro-batch."""
    await asyncio.gather(*(pair.a.send(B, replace(HOP, micro=number), array) for number, array in enumerate(arrays)))
    await until(lambda: len(pair.got) == len(arrays), 20)


@pytest.mark.parametrize(("host", "lane"), [("here", "shm"), ("elsewhere", "chunks")])
async def test_tensors_arrive_once_in_order_over_the_best_lane(make: MakePair, host: str, lane: str) -> None:
    """Small ones inline, large ones by shared memory or chunks; bits, shape, dtype and header as sent."""
    pair = await make(host)
    rng = np.random.default_rng(1)
    for shape, lanes in (((3, 5), {"inline"}), ((), {"inline"}), ((0, 4), {"inline"}), ((2, 300, 1024), {lane})):
        pair.got.clear()
        arrays = [rng.standard_normal(shape).astype(dtype) for dtype in (np.float32, ml_dtypes.bfloat16, np.float16) for _ in range(3)]
        await send_all(pair, arrays)
        assert {hop.lane.partition(":")[0] for hop, _ in pair.got} == lanes
        for number, (array, (hop, got)) in enumerate(zip(arrays, pair.got, strict=True)):
            assert (hop.micro, hop.sender, hop.dtype, hop.shape) == (number, A, array.dtype.name, array.shape)
            assert got.dtype == array.dtype
            assert got.tobytes() == array.tobytes()


async def test_a_tensor_that_is_not_contiguous_arrives_as_it_looks(make: MakePair) -> None:
    """Transposed and sliced views."""
    pair = await make("elsewhere")
    array = np.arange(24, dtype=np.int64).reshape(4, 6).T[::2]
    await send_all(pair, [array])
    np.testing.assert_array_equal(pair.got[0][1], array)


async def test_both_phases_are_heard_until_unlisten(make: MakePair) -> None:
    """Listening twice is listening once."""
    pair = await make("here")
    await pair.b.listen(NET, [NODE])
    await pair.a.send(B, HOP, np.zeros(1))
    await pair.a.send(B, replace(HOP, phase="bwd"), np.ones(1))
    await until(lambda: len(pair.got) == 2)
    assert {hop.phase for hop, _ in pair.got} == {"fwd", "bwd"}
    await pair.b.unlisten(NET, [NODE, NodeId("never")])
    passed: list[bytes] = []
    control = await pair.buses[1].subscribe(subjects.hop(NET, NODE, "fwd"), passed.append)
    await pair.a.send(B, HOP, np.zeros(1))
    await until(lambda: bool(passed))
    await control.stop()
    await pair.b.listen(NET, [NODE])
    await pair.a.send(B, replace(HOP, step=2), np.zeros(1))
    await until(lambda: len(pair.got) == 3)
    assert pair.got[-1][0].step == 2


async def test_a_slow_peer_does_not_block_another() -> None:
    """`a` waits for a peer that never answers, and goes on with `b`."""
    broker = MemoryBroker()
    pair = Pair((broker.connect(), broker.connect()), ("here", "elsewhere"))
    await pair.b.listen(NET, [NODE])
    dead = asyncio.create_task(pair.a.send(PNodeId("dead"), replace(HOP, targets=((NodeId("m"), 0),)), np.zeros(8 * MIB, np.uint8)))
    await send_all(pair, [np.zeros(MIB, np.uint8)] * 5)
    assert not dead.done()
    await pair.close()
    with pytest.raises(WorldError):
        await dead


async def test_where_shared_memory_is_refused_chunks_carry_the_tensor(make: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and from then on without asking again."""
    pair = await make("here")

    def closed(name: str, control: int = 0) -> segment.Segment:
        raise FileNotFoundError(name)

    monkeypatch.setattr(segment, "attach", closed)
    await send_all(pair, [np.full(MIB, number, np.uint8) for number in range(4)])
    assert {hop.lane for hop, _ in pair.got} == {"chunks"}
    assert sorted(int(array[0]) for _, array in pair.got) == [0, 1, 2, 3]


async def direct_pair(url: str) -> Pair:
    """On two hosts, and connected."""
    pair = Pair((await connect(url, "a"), await connect(url, "b")), ("here", "elsewhere"), direct=True)
    await pair.b.listen(NET, [NODE])
    async with asyncio.timeout(20):
        await pair.a.met(B)
    return pair


async def test_peers_that_reach_each_other_use_a_connection_of_their_own(nats_url: str) -> None:
    """Large tensors only; small ones stay with their header."""
    pair = await direct_pair(nats_url)
    arrays = [np.random.default_rng(number).integers(0, 255, size, np.uint8) for number, size in enumerate((100, 3 * MIB, 3 * MIB))]
    await send_all(pair, arrays)
    got = sorted(pair.got, key=lambda one: one[0].micro)
    assert [hop.lane for hop, _ in got] == ["inline", "tcp", "tcp"]
    for array, (_, other) in zip(arrays, got, strict=True):
        np.testing.assert_array_equal(array, other)
    await pair.close()


async def test_the_lane_of_each_peer_and_its_speed_are_known(nats_url: str) -> None:
    """A connection is measured when it is made, other lanes by what went over them; peers that left are not listed."""
    pair = await direct_pair(nats_url)
    (link,) = pair.a.links()
    assert (link.pnode, link.lane) == (B, "tcp")
    assert link.mb_per_s > 0
    (back,) = pair.b.links()
    assert (back.pnode, back.lane) == (A, "tcp")
    pair.a.set_peers([info(A, "here")])
    assert pair.a.links() == ()
    await pair.close()

    near = Pair((await connect(nats_url, "a"), await connect(nats_url, "b")), ("here", "here"))
    await near.b.listen(NET, [NODE])
    assert [(link.lane, link.mb_per_s) for link in near.a.links()] == [("shm", 0)]
    await send_all(near, [np.zeros(4 * MIB, np.uint8)])
    assert near.a.links()[0].mb_per_s > 0
    await near.close()


async def test_a_connection_that_breaks_costs_nothing_but_time(nats_url: str) -> None:
    """Again and again in the middle of transfers: every tensor arrives once, unharmed, over whatever there is."""
    pair = await direct_pair(nats_url)
    arrays: list[Array] = [np.random.default_rng(number).integers(0, 255, 8 * MIB, np.uint8) for number in range(12)]
    sending = asyncio.create_task(send_all(pair, arrays))
    for count in range(4):
        await until(lambda count=count: len(pair.got) > 2 * count)  # type: ignore[misc]
        if (link := pair.a._tcp._link(B)) is not None:
            link.abort()
    await sending
    for number, (hop, got) in enumerate(sorted(pair.got, key=lambda one: one[0].micro)):
        assert hop.micro == number
        np.testing.assert_array_equal(got, arrays[number])
    assert pair.b.dropped.total() == 0
    await pair.close()


async def test_where_shared_memory_is_refused_peers_connect(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers of one machine: chunks first, then TCP."""
    pair = Pair((await connect(nats_url, "a"), await connect(nats_url, "b")), ("here", "here"), direct=True)
    await pair.b.listen(NET, [NODE])

    def closed(name: str, control: int = 0) -> segment.Segment:
        raise FileNotFoundError(name)

    monkeypatch.setattr(segment, "attach", closed)
    await send_all(pair, [np.zeros(MIB, np.uint8)])
    async with asyncio.timeout(20):
        await pair.a.met(B)
    await pair.a.send(B, HOP, np.ones(MIB, np.uint8))
    assert [hop.lane for hop, _ in pair.got] == ["chunks", "tcp"]
    await pair.close()


@pytest.mark.parametrize(("host", "lane"), [("here", "shm"), ("elsewhere", "chunks")])
@pytest.mark.parametrize("wanted", ["fp16", "int8", "native"])
async def test_floats_travel_as_the_hop_says(make: MakePair, host: str, lane: str, wanted: str) -> None:
    """On every lane, in order, with their own dtype and shape at the end; ids are never touched."""
    pair = await make(host)
    floats: list[Array] = [np.random.default_rng(seed).standard_normal((3, 1000, 1024)).astype(np.float32) for seed in range(3)]
    arrays: list[Array] = [*floats, np.arange(7), floats[0][0, :5]]
    await asyncio.gather(*(pair.a.send(B, replace(HOP, micro=number, codec=wanted), array) for number, array in enumerate(arrays)))
    await until(lambda: len(pair.got) == len(arrays), 20)
    got = {hop.micro: (hop, array) for hop, array in pair.got}
    assert [hop.micro for hop, _ in pair.got if hop.micro < len(floats)] == [0, 1, 2]
    for number, array in enumerate(arrays):
        hop, other = got[number]
        expected = wire.codec_for(wanted, array.dtype)
        assert (hop.codec, other.dtype, other.shape) == (expected, array.dtype, array.shape)
        alike = wire.decode(expected, wire.encode(expected, array), array.dtype, array.shape)
        np.testing.assert_array_equal(other, alike)
    assert got[0][0].lane.partition(":")[0] == lane
    assert got[4][0].lane == "inline"


class OnDevices:
    """`a` and `b` with a device each, on one host. `far`: what arrived on that of `b`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.far: list[tuple[Hop, Array]] = []
        self.near: Got = []
        host = FakeHost()
        self.devices = (FakePort(host), FakePort(host))

    async def __aenter__(self) -> OnDevices:
        self.buses = (await connect(self._url, "a"), await connect(self._url, "b"))
        sides = (DeviceSide(self.devices[0], lambda *_: None), DeviceSide(self.devices[1], self._on_device))
        self.a = HopTransport(self.buses[0], A, "here", lambda *_: None, device=sides[0])
        self.b = HopTransport(self.buses[1], B, "here", lambda hop, array: self.near.append((hop, array)), device=sides[1])
        for one in (self.a, self.b):
            one.set_peers([replace(info(peer, "here"), backend="cupy") for peer in (A, B)])
        await self.b.listen(NET, [NODE])
        return self

    def _on_device(self, hop: Hop, buffer: DeviceBuffer) -> None:
        assert isinstance(buffer, FakeBuffer)
        self.far.append((hop, buffer.array))

    async def __aexit__(self, *_: object) -> None:
        for transport, bus in zip((self.a, self.b), self.buses, strict=True):
            await transport.close()
            await bus.close()


async def test_tensors_on_a_device_stay_on_devices_where_they_can(nats_url: str) -> None:
    """Never encoded, whatever the hop says; arrays of the host go as ever."""
    array = np.random.default_rng(1).standard_normal((3, 1 << 20)).astype(np.float32)
    async with OnDevices(nats_url) as pair:
        await pair.a.send(B, replace(HOP, codec="int8"), FakeBuffer(array))
        await pair.a.send(B, HOP, array)
        assert [hop.lane.partition(":")[0] for hop, _ in (*pair.far, *pair.near)] == ["cuda", "shm"]
        np.testing.assert_array_equal(pair.far[0][1], array)
        np.testing.assert_array_equal(pair.near[0][1], array)
        assert pair.a.links()[0].lane == "cuda"
        assert pair.a.links()[0].mb_per_s > 0


@pytest.mark.parametrize(("side", "what"), [(0, "stage"), (0, "copy"), (1, "open"), (1, "copy")])
async def test_where_a_device_refuses_tensors_go_through_host_memory(nats_url: str, side: int, what: str) -> None:
    """Once each, and from then on without asking again."""
    async with OnDevices(nats_url) as pair:
        pair.devices[side].broken.add(what)
        for number in range(3):
            await pair.a.send(B, replace(HOP, micro=number), FakeBuffer(np.full(MIB, number, np.uint8)))
        assert [(hop.micro, int(array[0])) for hop, array in pair.near] == [(0, 0), (1, 1), (2, 2)]
        assert pair.far == []
        assert pair.a.links()[0].lane == "shm"


async def test_tensors_on_a_device_reach_peers_without_one(nats_url: str) -> None:
    """And empty ones anybody; without a device of our own they are a bug."""
    async with OnDevices(nats_url) as pair:
        pair.a.set_peers([info(B, "here")])
        await pair.a.send(B, HOP, FakeBuffer(np.ones(MIB, np.uint8)))
        pair.a.set_peers([replace(info(B, "here"), backend="cupy")])
        await pair.a.send(B, HOP, FakeBuffer(np.ones((0, 4), np.uint8)))
        await until(lambda: len(pair.near) == 2)
        assert [array.shape for _, array in pair.near] == [(MIB,), (0, 4)]
        plain = HopTransport(pair.buses[0], PNodeId("plain"), "here", lambda *_: None, direct=False)
        with pytest.raises(InvariantError, match="without one"):
            await plain.send(B, HOP, FakeBuffer(np.ones(4)))
        await plain.close()


async def test_a_peer_that_was_started_anew_is_tried_again(nats_url: str) -> None:
    """What the old process could not open, the new one may."""
    async with OnDevices(nats_url) as pair:
        pair.devices[1].broken.add("open")
        await pair.a.send(B, HOP, FakeBuffer(np.ones(MIB, np.uint8)))
        pair.devices[1].broken.clear()
        pair.a.set_peers([replace(info(B, "here"), backend="cupy", incarnation="2")])
        await until(lambda: pair.a.links()[0].lane == "cuda")
        await pair.a.send(B, HOP, FakeBuffer(np.ones(MIB, np.uint8)))
        assert (len(pair.near), len(pair.far)) == (1, 1)


async def test_bad_messages_are_dropped_counted_and_do_no_harm(make: MakePair) -> None:
    """Noise, other messages, unknown lanes and dtypes, on every subject."""
    pair = await make("elsewhere")
    good = replace(HOP, sender=A, dtype="uint8", shape=(1,), nbytes=1, transfer=1)
    bad_hops = [
        b"",
        b"noise",
        codec.encode_with_payload(Credit(A, 1, 1), b""),
        codec.encode_with_payload(replace(good, lane="pigeon"), b"x"),
        codec.encode_with_payload(replace(good, dtype="O"), b"x"),
        codec.encode_with_payload(replace(good, shape=(2,)), b"x"),
        codec.encode_with_payload(good, b"xy"),
    ]
    for data in bad_hops:
        await pair.buses[0].publish(subjects.hop(NET, NODE, "fwd"), data)
    await pair.buses[0].publish(subjects.peer(B, "credit"), codec.encode(Chunk(A, 1, 1, 1)))
    await pair.buses[0].publish(subjects.peer(B, "credit"), codec.encode(Credit(A, 1, 1)))
    await pair.buses[0].publish(subjects.peer(B, "chunk"), b"noise")
    await until(lambda: pair.b.dropped.total() == len(bad_hops) + 2)
    await send_all(pair, [np.ones(2 * MIB, np.uint8)])


async def test_a_server_that_restarts_in_the_middle_of_a_transfer_costs_nothing_but_time(tmp_path: Path) -> None:
    """SIGKILL while chunks are under way: every tensor arrives once, unharmed."""
    server = NatsServer(tmp_path / "nats")
    await server.start()
    pair = Pair((await connect(server.url, "a"), await connect(server.url, "b")), ("here", "elsewhere"))
    await pair.b.listen(NET, [NODE])
    arrays: list[Array] = [np.random.default_rng(number).integers(0, 255, 24 * MIB, np.uint8) for number in range(3)]
    sending = asyncio.create_task(send_all(pair, arrays))
    await until(lambda: bool(pair.got))
    server.kill()
    await server.stop()
    server = NatsServer(tmp_path / "nats", port=int(server.url.rsplit(":", 1)[1]))
    await server.start()
    await sending
    for number, (hop, got) in enumerate(sorted(pair.got, key=lambda one: one[0].micro)):
        assert hop.micro == number
        np.testing.assert_array_equal(got, arrays[number])
    await pair.close()
    await server.stop()


async def test_close_leaves_nothing(make: MakePair, own_directory: Path) -> None:
    """No segment, no task, and a second close is fine."""
    pair = await make("here")
    await send_all(pair, [np.zeros(MIB, np.uint8)])
    assert len(list(own_directory.iterdir())) == 1
    await pair.a.close()
    await pair.a.close()
    await pair.b.close()
    assert list(own_directory.iterdir()) == []


@pytest.mark.parametrize("host", ["here", "elsewhere"])
async def test_close_ends_sends_that_wait_for_room(host: str) -> None:
    """A receiver that is not there, more tensors than a ring or window holds: each send fails, none hangs."""
    broker = MemoryBroker()
    pair = Pair((broker.connect(), broker.connect()), ("here", host))
    sends = [asyncio.create_task(pair.a.send(B, HOP, np.zeros(3 * MIB, np.uint8))) for _ in range(6)]
    heard: list[bytes] = []
    await pair.buses[1].subscribe(subjects.hop(NET, NODE, "fwd"), heard.append)
    await until(lambda: bool(heard))
    await pair.close()
    results = await asyncio.gather(*sends, return_exceptions=True)
    assert [type(result) for result in results] == [WorldError] * 6
    with pytest.raises(WorldError):
        await pair.a.send(B, HOP, np.zeros(3 * MIB, np.uint8))
