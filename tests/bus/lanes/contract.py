"""What every lane must do: bytes of any size and type arrive once, headers that come twice or lie are survived."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from dcnr.bus import codec, subjects
from dcnr.bus.base import Bus
from dcnr.bus.lanes.base import DTYPES, Array, Lane, LaneBroken, Port, bytes_of
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import Credit, Hop
from dcnr.errors import PeerError, WorldError
from dcnr.ids import Epoch, NetworkId, NodeId, PNodeId, SessionId
from tests.bus.contract import until
from tests.bus.lanes.weather import Weather, cut

NETWORK = NetworkId("net")
TARGET = NodeId("target")


def hop_for(array: Array, transfer: int, sender: PNodeId) -> Hop:
    """The header of a forward hop to `TARGET`."""
    header = Hop(NETWORK, SessionId("s"), Epoch(1), 1, 0, 0, "fwd", NodeId("a"), 0, ((TARGET, 0),), sender, array.dtype.name, array.shape)
    return replace(header, nbytes=array.nbytes, transfer=transfer)


@dataclass
class End:
    """One process of a test: a port, the lane under test, and what was delivered."""

    port: Port
    lane: Lane
    bus: Bus
    got: list[tuple[Hop, Array]] = field(default_factory=list)
    headers: list[bytes] = field(default_factory=list)
    lose: int = 0
    """How many headers are lost before one is heard."""
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def open(self) -> None:
        """Hear headers and credits, as the transport does."""
        await self.lane.start()
        await self.bus.subscribe(subjects.hop(NETWORK, TARGET, "fwd"), self.hear)
        await self.bus.subscribe(subjects.peer(self.port.me, "credit"), self.hear_credit)

    def hear(self, data: bytes) -> None:
        """A header came."""
        self.headers.append(data)
        if self.lose:
            self.lose -= 1
            return
        try:
            hop, payload = codec.decode_with_payload(data)
            assert isinstance(hop, Hop)
            self.lane.on_header(hop, payload)
        except PeerError as error:
            self.port.drop(error)

    def hear_credit(self, data: bytes) -> None:
        """A credit came."""
        credit = codec.decode(data)
        assert isinstance(credit, Credit)
        self.lane.on_credit(credit)

    async def send(self, to: End, array: Array) -> Hop:
        """Send as the transport does, and wait until it has arrived."""
        hop = hop_for(array, self.port.next_transfer(), self.port.me)
        await (await self.lane.send(to.port.me, replace(hop, lane=self.lane.name), bytes_of(array)))
        return hop

    async def send_in_turn(self, to: End, array: Array) -> Hop:
        """The same, one after the other, as a lane is called; that it has arrived is waited for side by side."""
        hop = hop_for(array, self.port.next_transfer(), self.port.me)
        async with self.turn:
            arrived = await self.lane.send(to.port.me, replace(hop, lane=self.lane.name), bytes_of(array))
        await arrived
        return hop

    async def close(self) -> None:
        """Let go of everything."""
        await self.port.close()
        await self.lane.close()
        await self.bus.close()


Pair = Callable[[], Awaitable[tuple[End, End]]]


async def make_end(broker: MemoryBroker, name: str, make_lane: Callable[[Port], Lane]) -> End:
    """An end on `broker`."""
    bus = broker.connect(name)
    got: list[tuple[Hop, Array]] = []
    port = Port(bus, PNodeId(name), lambda hop, array: got.append((hop, array)))
    return End(port, make_lane(port), bus, got, broker=broker)


class LaneContract:
    """Subclasses provide the fixture `pair`: sender and receiver, opened. The sender's end hears no headers of its own."""

    sizes: tuple[int, ...] = (1, 7, 64, 4097)

    @pytest.mark.parametrize("dtype", sorted(DTYPES))
    async def test_every_dtype_arrives_as_it_was(self, pair: Pair, dtype: str) -> None:
        """Bit for bit, with its shape."""
        sender, receiver = await pair()
        array = (np.arange(2 * 3 * self.sizes[-1]) % 100).reshape(2, 3, -1).astype(DTYPES[dtype])
        await sender.send(receiver, array)
        await until(lambda: bool(receiver.got))
        got = receiver.got[0][1]
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert bytes_of(got).tobytes() == bytes_of(array).tobytes()
        await sender.close()
        await receiver.close()

    async def test_sizes_and_order(self, pair: Pair) -> None:
        """Small and large, several under way at once, delivered in the order of sending."""
        sender, receiver = await pair()
        arrays = [np.full(size, number, np.float32) for number, size in enumerate(self.sizes * 5)]
        await asyncio.gather(*(sender.send_in_turn(receiver, array) for array in arrays))
        await until(lambda: len(receiver.got) == len(arrays))
        for array, (_, got) in zip(arrays, receiver.got, strict=True):
            np.testing.assert_array_equal(got, array)
        await sender.close()
        await receiver.close()

    async def test_an_array_that_is_kept_is_never_written_over(self, pair: Pair) -> None:
        """However many follow."""
        sender, receiver = await pair()
        for number in range(12):
            await sender.send(receiver, np.full(self.sizes[-1], number, np.int32))
        await until(lambda: len(receiver.got) == 12)
        for number, (_, got) in enumerate(receiver.got):
            assert (got == number).all()
        await sender.close()
        await receiver.close()

    async def test_a_repeated_header_delivers_nothing(self, pair: Pair) -> None:
        """Effects happen once."""
        sender, receiver = await pair()
        await sender.send(receiver, np.ones(self.sizes[-1], np.float32))
        await until(lambda: bool(receiver.got))
        for _ in range(3):
            receiver.hear(receiver.headers[0])
        await asyncio.sleep(0)
        assert len(receiver.got) == 1
        await sender.close()
        await receiver.close()


class AcknowledgedLaneContract(LaneContract):
    """For lanes whose receiver answers with credits."""

    async def test_a_lost_header_is_sent_again(self, pair: Pair) -> None:
        """Until there is a credit."""
        sender, receiver = await pair()
        receiver.lose = 2
        await sender.send(receiver, np.ones(self.sizes[-1], np.float32))
        assert len(receiver.got) == 1
        assert len(receiver.headers) == 3
        await sender.close()
        await receiver.close()

    async def begin_anew(self, sender: End, receiver: End) -> None:
        """What a transport does before it uses a lane again that has failed, if anything."""

    async def _still_works(self, sender: End, receiver: End) -> None:
        """One more tensor arrives, and nothing is left of those that failed."""
        sender.broker.fate = None
        await self.begin_anew(sender, receiver)
        before = len(receiver.got)
        for number in range(3):
            await sender.send(receiver, np.full(self.sizes[-1], number, np.float32))
        await until(lambda: len(receiver.got) == before + 3)
        for number, (_, got) in enumerate(receiver.got[before:]):
            assert (got == number).all()

    @pytest.mark.parametrize("seed", range(4))
    async def test_whatever_the_bus_does_tensors_arrive_whole_and_once(self, pair: Pair, seed: int) -> None:
        """Headers, bytes and credits are lost, repeated, delayed and overtaken: a send ends, and what it says is true."""
        sender, receiver = await pair()
        sender.broker.fate = weather = Weather(seed)
        sizes = [weather.rng.choice(self.sizes) for _ in range(25)]
        arrays = [np.full(size, number, np.int32) for number, size in enumerate(sizes)]
        async with asyncio.timeout(30):
            sends = (sender.send_in_turn(receiver, array) for array in arrays)
            results = await asyncio.gather(*sends, return_exceptions=True)
        assert {type(result) for result in results} <= {Hop, WorldError, LaneBroken}, f"seed {seed}"
        sent = {int(array[0]) for array, result in zip(arrays, results, strict=True) if isinstance(result, Hop)}
        await until(lambda: sent <= {int(got[0]) for _, got in receiver.got})
        numbers = [int(got[0]) for _, got in receiver.got]
        assert len(numbers) == len(set(numbers)), f"seed {seed}"
        assert len(sent) > len(arrays) // 2, f"seed {seed}"
        for number, (_, got) in zip(numbers, receiver.got, strict=True):
            np.testing.assert_array_equal(got, arrays[number], f"seed {seed}")
        await self._still_works(sender, receiver)
        await sender.close()
        await receiver.close()

    @pytest.mark.parametrize("way", [("s", "r"), ("r", "s")], ids=["there", "back"])
    async def test_a_connection_that_is_cut_in_one_direction_fails_the_send_and_not_the_lane(
        self, pair: Pair, way: tuple[str, str]
    ) -> None:
        """Neither a receiver that hears nothing nor one that is not heard holds a sender for long; at most one of its tensors is there."""
        sender, receiver = await pair()
        sender.broker.fate = cut(*way)
        async with asyncio.timeout(20):
            with pytest.raises(WorldError):
                await sender.send(receiver, np.ones(self.sizes[-1], np.float32))
        assert len(receiver.got) <= 1
        receiver.got.clear()
        await self._still_works(sender, receiver)
        await sender.close()
        await receiver.close()

    async def test_a_peer_that_is_gone_ends_what_is_under_way_at_once(self, pair: Pair) -> None:
        """However patient the lane is; whoever bears the name afterwards gets its tensors."""
        sender, receiver = await pair()
        receiver.lose = 1 << 30
        sends = [asyncio.create_task(sender.send_in_turn(receiver, np.ones(self.sizes[-1], np.float32))) for _ in range(6)]
        await until(lambda: bool(receiver.headers))
        sender.lane.release(receiver.port.me)
        async with asyncio.timeout(20):
            results = await asyncio.gather(sends[0], return_exceptions=True)
        assert [type(result) for result in results] in ([WorldError], [LaneBroken])
        for task in sends:
            task.cancel()
        await asyncio.gather(*sends, return_exceptions=True)
        receiver.lose = 0
        receiver.lane.release(sender.port.me)
        await self._still_works(sender, receiver)
        await sender.close()
        await receiver.close()
