"""The bad network does what it says to messages, and nothing to anything else."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from dcnr.bus.nats import NatsBus, connect
from dcnr.errors import WorldError
from tests.bus.contract import until
from tests.faults.proxy import Frame, Frames, Proxy, Weather

pytestmark = pytest.mark.nats

SEED = 11
MANY = 400
STREAM = (
    b'CONNECT {"name":"a"}\r\nPING\r\nSUB dcnr.x 1\r\nPUB dcnr.x 5\r\na\r\nbc\r\nPUB dcnr.x reply 0\r\n\r\n'
    b"HPUB dcnr.x 12 14\r\nNATS/1.0\r\n\r\nhi\r\nPONG\r\n"
)


def test_frames_are_found_in_any_portions() -> None:
    """Bodies may hold line ends, be empty, and have headers."""
    draw = random.Random(SEED)
    for _ in range(50):
        frames, rest, found = Frames(), STREAM, list[Frame]()
        while rest:
            size = draw.randint(1, 20)
            found += frames.feed(rest[:size])
            rest = rest[size:]
        assert b"".join(frame.raw for frame in found) == STREAM
        assert [(frame.verb, frame.body) for frame in found if frame.subject] == [
            (b"PUB", b"a\r\nbc"),
            (b"PUB", b""),
            (b"HPUB", b"NATS/1.0\r\n\r\nhi"),
        ]


@dataclass
class Pair:
    """Two clients, both behind the proxy, and what the second heard on a subject of ours and on another one."""

    proxy: Proxy
    sender: NatsBus
    receiver: NatsBus
    ours: list[bytes]
    others: list[bytes]

    async def send(self, count: int) -> None:
        """Numbers, on both subjects."""
        for number in range(count):
            await self.sender.publish("dcnr.test.x", b"%d" % number)
            await self.sender.publish("else.test.x", b"%d" % number)


@pytest.fixture
async def pair(nats_url: str) -> AsyncIterator[Pair]:
    """On the session's server."""
    async with Proxy(nats_url, SEED) as proxy:
        sender, receiver = await connect(proxy.url, "sender"), await connect(proxy.url, "receiver")
        one = Pair(proxy, sender, receiver, [], [])
        await receiver.subscribe("dcnr.test.x", one.ours.append)
        await receiver.subscribe("else.test.x", one.others.append)
        yield one
        await sender.close()
        await receiver.close()


def numbers(count: int) -> list[bytes]:
    """What was sent."""
    return [b"%d" % number for number in range(count)]


async def test_messages_are_lost_as_often_as_said(pair: Pair) -> None:
    """A share of ours, none of the others, and all in order."""
    pair.proxy.weather = Weather(loss=0.1)
    await pair.send(MANY)
    await until(lambda: pair.others == numbers(MANY))
    assert 0.04 * MANY < pair.proxy.counts["lost"] < 0.2 * MANY
    await until(lambda: len(pair.ours) == MANY - pair.proxy.counts["lost"])
    assert pair.ours == sorted(pair.ours, key=int)


async def test_messages_come_twice_and_are_overtaken(pair: Pair) -> None:
    """All of ours, some again, and not in order; the others in order."""
    pair.proxy.weather = Weather(twice=0.1, overtaken=0.1)
    await pair.send(MANY)
    await until(lambda: len(pair.ours) == MANY + pair.proxy.counts["twice"] and len(pair.others) == MANY)
    assert pair.proxy.counts["twice"] > 0
    assert pair.proxy.counts["overtaken"] > 0
    assert set(pair.ours) == set(numbers(MANY))
    assert pair.ours != sorted(pair.ours, key=int)
    assert pair.others == numbers(MANY)


async def test_what_is_late_keeps_its_order(pair: Pair) -> None:
    """Nothing is lost."""
    pair.proxy.weather = Weather(late=0.01)
    await pair.send(50)
    await until(lambda: pair.ours == numbers(50) and pair.others == numbers(50))


async def test_a_cut_connection_comes_back(pair: Pair) -> None:
    """The client reconnects through the proxy by itself, and only the one that was meant."""
    assert pair.proxy.cut("sender") == 1
    await until(lambda: not pair.sender.is_connected)
    await until(lambda: pair.sender.is_connected)
    await pair.send(1)
    await until(lambda: pair.ours == numbers(1))


async def test_one_direction_can_be_dead(pair: Pair) -> None:
    """What the receiver says is heard, what is said to it is not."""
    heard = list[bytes]()
    await pair.sender.subscribe("dcnr.test.back", heard.append)
    pair.proxy.deafen("down", "receiver")
    await pair.send(5)
    await until(lambda: pair.proxy.counts["unheard"] >= 10)
    assert pair.ours == []
    await pair.receiver.publish("dcnr.test.back", b"x")
    await until(lambda: heard == [b"x"])


async def test_a_stall_holds_everything_back(pair: Pair) -> None:
    """And lets it go in order."""
    pair.proxy.stall()
    await pair.send(5)
    with pytest.raises(WorldError):  # by then all would have been heard
        await pair.sender.request("dcnr.test.x", b"last", 0.3)
    assert pair.ours == pair.others == []
    pair.proxy.flow()
    await until(lambda: pair.ours == [*numbers(5), b"last"] and pair.others == numbers(5))


async def test_a_tap_sees_who_says_what(pair: Pair) -> None:
    """Before it goes on."""
    seen: list[tuple[str, str, bytes]] = []
    pair.proxy.tap = lambda client, subject, body: seen.append((client, subject, body))
    await pair.send(1)
    await until(lambda: pair.ours == numbers(1))
    assert seen == [("sender", "dcnr.test.x", b"0")]


async def test_it_knows_what_a_client_listens_to(pair: Pair) -> None:
    """Until it does not any more."""
    (link,) = pair.proxy.links("receiver")
    assert {"dcnr.test.x", "else.test.x"} <= set(link.interests.values())
    before = len(link.interests)
    more = await pair.receiver.subscribe("dcnr.test.y", pair.ours.append)
    assert len(link.interests) == before + 1
    await more.stop()
    await until(lambda: len(link.interests) == before)
