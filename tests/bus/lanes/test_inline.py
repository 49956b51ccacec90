"""Tensors inside their header's message."""

from __future__ import annotations

import numpy as np
import pytest

from dcnr.bus.lanes.base import HEADER_ROOM
from dcnr.bus.lanes.inline import INLINE_LIMIT, InlineLane
from dcnr.bus.memory import MemoryBroker
from dcnr.ids import PNodeId
from tests.bus.contract import until
from tests.bus.lanes.contract import End, LaneContract, Pair, make_end


async def inline_pair(broker: MemoryBroker) -> tuple[End, End]:
    """Sender and receiver on one broker."""
    sender, receiver = await make_end(broker, "s", InlineLane), await make_end(broker, "r", InlineLane)
    await receiver.open()
    return sender, receiver


class TestInline(LaneContract):
    """The common cases; nothing is acknowledged."""

    sizes = (0, 1, 7, 64, 4097)

    @pytest.fixture
    def pair(self) -> Pair:
        """Sender and receiver on a broker of their own."""
        return lambda: inline_pair(MemoryBroker())


@pytest.mark.parametrize("max_payload", [64 << 10, 1 << 20])
async def test_serves_what_fits_one_message(max_payload: int) -> None:
    """With room for the header, and never more than the limit for unacknowledged bytes."""
    sender, receiver = await inline_pair(MemoryBroker(max_payload))
    largest = min(INLINE_LIMIT, max_payload - HEADER_ROOM)
    assert sender.lane.serves(PNodeId("r"), largest)
    assert not sender.lane.serves(PNodeId("r"), largest + 1)
    await sender.send(receiver, np.zeros(largest, np.uint8))
    await until(lambda: bool(receiver.got))
    await sender.close()
    await receiver.close()


async def test_a_payload_of_another_length_is_dropped_and_counted() -> None:
    """Cut or padded on the way."""
    sender, receiver = await inline_pair(MemoryBroker())
    await sender.send(receiver, np.zeros(8, np.uint8))
    await until(lambda: bool(receiver.got))
    _, fresh = await inline_pair(MemoryBroker())
    fresh.hear(receiver.headers[0] + b"x")
    fresh.hear(receiver.headers[0][:-1])
    assert fresh.got == []
    assert fresh.port.dropped["hop"] == 2
    for end in (sender, receiver, fresh):
        await end.close()
