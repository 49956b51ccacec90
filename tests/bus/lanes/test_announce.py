"""A header is published until there is a credit, and its memory is settled once, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from dcnr.bus import subjects
from dcnr.bus.lanes.announce import Announcements
from dcnr.bus.lanes.base import REFUSED, LaneBroken, Port
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import Credit
from dcnr.bus.pace import TRIES
from dcnr.errors import WorldError
from dcnr.ids import PNodeId
from tests.bus.contract import until
from tests.bus.lanes.contract import NETWORK, TARGET, hop_for

S, R = PNodeId("s"), PNodeId("r")
HOP = hop_for(np.zeros(4, np.uint8), 7, S)


@dataclass
class Desk:
    """A sender, what was published, and how its memory was settled."""

    port: Port
    announcements: Announcements
    headers: list[bytes] = field(default_factory=list)
    settled: list[bool] = field(default_factory=list)

    async def send(self) -> asyncio.Future[None]:
        """Announce the one tensor."""
        return await self.announcements.send(R, HOP, self.settled.append, lambda: LaneBroken("refused"))


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    """With little patience."""
    bus = MemoryBroker().connect()
    port = Port(bus, S, lambda *_: None)
    one = Desk(port, Announcements(port, 0.02))
    await bus.subscribe(subjects.hop(NETWORK, TARGET, "fwd"), one.headers.append)
    yield one
    await port.close()


async def test_a_credit_of_the_receiver_ends_it(desk: Desk) -> None:
    """Not one of somebody else, nor of another transfer."""
    arrived = await desk.send()
    await until(lambda: len(desk.headers) >= 2)
    desk.announcements.credit(Credit(PNodeId("other"), HOP.transfer, 4))
    desk.announcements.credit(Credit(R, HOP.transfer + 1, 4))
    assert not arrived.done()
    desk.announcements.credit(Credit(R, HOP.transfer, 4))
    await arrived
    assert desk.settled == [True]


async def test_a_refusal_says_what_the_lane_says(desk: Desk) -> None:
    """Nobody knows what the receiver has."""
    arrived = await desk.send()
    desk.announcements.credit(Credit(R, HOP.transfer, REFUSED))
    with pytest.raises(LaneBroken, match="refused"):
        await arrived
    assert desk.settled == [False]


async def test_silence_ends_it_after_some_tries(desk: Desk) -> None:
    """With a reason."""
    with pytest.raises(WorldError, match="r does not take tensors"):
        await (await desk.send())
    assert 2 <= len(desk.headers) <= TRIES
    assert desk.settled == [False]


async def test_a_receiver_that_is_gone_ends_it_at_once(desk: Desk) -> None:
    """Not another one."""
    arrived = await desk.send()
    desk.announcements.release(PNodeId("other"))
    await asyncio.sleep(0)
    assert not arrived.done()
    desk.announcements.release(R)
    with pytest.raises(WorldError, match="takes no part"):
        await arrived
    assert desk.settled == [False]


async def test_close_settles_also_what_never_began(desk: Desk) -> None:
    """The task of a header that is cancelled before its first step."""
    sending = asyncio.create_task(desk.send())
    await asyncio.sleep(0)  # the task of the header exists, and has not run
    await desk.port.close()
    with pytest.raises(WorldError, match="given up"):
        await (await sending)
    assert desk.settled == [False]
