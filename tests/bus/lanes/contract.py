"""What every lane must do: bytes of any size and type arrive once, headers that come twice or lie are survived."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from dcnr.bus import codec, subjects
from dcnr.bus.base import Bus
from dcnr.bus.lanes.base import DTYPES, Array, Lane, Port, bytes_of
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import Credit, Hop
from dcnr.errors import PeerError
from dcnr.ids import Epoch, NetworkId, NodeId, PNodeId, SessionId
from tests.bus.contract import until

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

    async def close(self) -> None:
        """Let go of everything."""
        await self.port.close()
        await self.lane.close()
        await self.bus.close()


Pair = Callable[[], Awaitable[tuple[End, End]]]


async def make_end(broker: MemoryBroker, name: str, make_lane: Callable[[Port], Lane]) -> End:
    """An end on `broker`."""
    bus = broker.connect()
    got: list[tuple[Hop, Array]] = []
    port = Port(bus, PNodeId(name), lambda hop, array: got.append((hop, array)))
    return End(port, make_lane(port), bus, got)


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
        lock = asyncio.Lock()

        async def send(array: Array) -> None:
            hop = hop_for(array, sender.port.next_transfer(), sender.port.me)
            async with lock:
                arrived = await sender.lane.send(receiver.port.me, replace(hop, lane=sender.lane.name), bytes_of(array))
            await arrived

        await asyncio.gather(*(send(array) for array in arrays))
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
