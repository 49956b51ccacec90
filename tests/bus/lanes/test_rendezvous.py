"""Whoever can reach the other connects, with a token from the bus; where nobody can, nothing happens."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from dataclasses import replace

import pytest

from dcnr.bus import codec, subjects
from dcnr.bus.base import Way
from dcnr.bus.lanes import rendezvous
from dcnr.bus.lanes.base import Port
from dcnr.bus.lanes.handshake import TOKEN
from dcnr.bus.lanes.link import Link
from dcnr.bus.lanes.rendezvous import STRANGERS, Rendezvous
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import Address, Meet
from dcnr.errors import PeerError
from dcnr.ids import PNodeId
from tests.bus.contract import until

A, B = PNodeId("a"), PNodeId("b")
PLAIN, ENCRYPTED = Way("127.0.0.1", encrypted=False), Way("127.0.0.1", encrypted=True)


class Side:
    """One PNode, as far as connections go."""

    def __init__(self, broker: MemoryBroker, name: PNodeId, way: Way = PLAIN) -> None:
        self.port = Port(broker.connect(), name, lambda *_: None)
        self.meeting = Rendezvous(self.port, self, way, 5)
        self.lost_links: list[Link] = []

    def established(self, link: Link) -> None:
        """Pass on, as the lane does."""
        self.meeting.established(link)

    def place(self, link: Link, number: int, offset: int, size: int, nbytes: int) -> memoryview | None:
        """No transfers here."""
        return None

    def placed(self, link: Link, number: int, offset: int, size: int) -> None:
        """No transfers here."""

    def cancelled(self, link: Link, number: int) -> None:
        """No transfers here."""

    def lost(self, link: Link, error: PeerError | None) -> None:
        """Pass on, as the lane does."""
        self.lost_links.append(link)
        if error is not None:
            self.port.drop(error)
        self.meeting.lost(link)

    async def close(self) -> None:
        """Everything."""
        await self.port.close()
        await self.meeting.close()


async def started(*sides: Side) -> None:
    """All listen, and seek each other."""
    for side in sides:
        await side.meeting.start()
        side.meeting.seek(other.port.me for other in sides if other is not side)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No long pauses."""
    monkeypatch.setattr(rendezvous, "SECOND_SIDE", 0.05)
    monkeypatch.setattr(rendezvous, "FIRST_PAUSE", 0.01)


@pytest.mark.parametrize("way", [PLAIN, ENCRYPTED], ids=["clear", "tls"])
@pytest.mark.parametrize("deaf", ["", A, B])
@pytest.mark.usefixtures("quick")
async def test_it_is_enough_that_one_can_reach_the_other(way: Way, deaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may stand behind a firewall, whichever it is; a wrong address before the right one costs an attempt."""
    broker = MemoryBroker()
    sides = [Side(broker, A, way), Side(broker, B, way)]
    known = Rendezvous._addresses

    def addresses(meeting: Rendezvous) -> tuple[Address, ...]:
        nowhere: tuple[Address, ...] = (("127.0.0.1", 9),)
        return nowhere if meeting._port.me == deaf else nowhere + known(meeting)

    monkeypatch.setattr(Rendezvous, "_addresses", addresses)
    await started(*sides)
    async with asyncio.timeout(10):
        first, second = await asyncio.gather(sides[0].meeting.met(B), sides[1].meeting.met(A))
    assert (first.peer, second.peer) == (B, A)
    assert first.rate > 0
    for side in sides:
        await side.close()


@pytest.mark.usefixtures("quick")
async def test_peers_that_cannot_reach_each_other_stay_apart_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    """They try, ever more rarely; nothing is dropped or broken."""
    broker = MemoryBroker()
    sides = [Side(broker, A), Side(broker, B)]
    asked: list[int] = []

    def addresses() -> tuple[Address, ...]:
        asked.append(1)
        return (("127.0.0.1", 9),)

    for side in sides:
        monkeypatch.setattr(side.meeting, "_addresses", addresses)
    await started(*sides)
    await until(lambda: len(asked) >= 6)
    assert [side.meeting.link(other) for side, other in zip(sides, (B, A), strict=True)] == [None, None]
    assert [side.port.dropped.total() for side in sides] == [0, 0]
    for side in sides:
        await side.close()


@pytest.mark.usefixtures("quick")
async def test_one_side_with_tls_and_one_without_do_not_meet() -> None:
    """Never in the clear where the other expects a secret."""
    broker = MemoryBroker()
    sides = [Side(broker, A, PLAIN), Side(broker, B, ENCRYPTED)]
    await started(*sides)
    await until(lambda: all(side.port.dropped["meet"] for side in sides))
    assert sides[0].meeting.link(B) is None
    for side in sides:
        await side.close()


async def test_a_token_lets_one_connection_in_and_only_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second use fails, and so does a late one."""
    broker = MemoryBroker()
    one, two = Side(broker, A), Side(broker, B)
    await one.meeting.start()
    await two.meeting.start()
    invitation = one.meeting._invitation(B)
    assert len(bytes.fromhex(invitation.token)) == TOKEN
    assert one.meeting._invitation(B).token == invitation.token, "both sides may ask at the same time"
    assert await two.meeting._connect(invitation)
    await until(lambda: one.meeting.link(B) is not None)
    link = two.meeting.link(A)
    assert link is not None
    link.abort()
    await until(lambda: two.meeting.link(A) is None)
    assert not await two.meeting._connect(invitation)
    fresh = one.meeting._invitation(B)
    assert fresh.token != invitation.token
    monkeypatch.setattr(rendezvous, "TOKEN_SECONDS", -1.0)
    late = one.meeting._invitation(B)
    assert not await two.meeting._connect(late)
    await until(lambda: one.port.dropped["handshake"] == 2)
    await one.close()
    await two.close()


async def test_a_wrong_token_connects_nobody() -> None:
    """The caller sees that the listener knows another one."""
    broker = MemoryBroker()
    one, two = Side(broker, A), Side(broker, B)
    await one.meeting.start()
    await two.meeting.start()
    assert not await two.meeting._connect(replace(one.meeting._invitation(B), token="00" * TOKEN))
    await until(lambda: two.port.dropped["handshake"] == 1)
    for token in ("", "zz", "00"):
        with pytest.raises(PeerError, match="a token of"):
            await two.meeting._connect(replace(one.meeting._invitation(B), token=token))
    await one.close()
    await two.close()


@pytest.mark.parametrize(
    "address", [("", 0), ("127.0.0.1", -1), ("127.0.0.1", 1 << 20), ("no.such.host.invalid", 1), ("\0", 1), ("a" * 300, 1)]
)
async def test_addresses_that_are_none_are_tried_and_passed_over(address: Address) -> None:
    """They come from outside."""
    side = Side(MemoryBroker(), A)
    await side.meeting.start()
    assert not await side.meeting._connect(Meet(B, (address,), "00" * TOKEN, encrypted=False))
    await side.close()


async def test_questions_that_are_none_are_dropped_and_answered_with_nothing() -> None:
    """Noise, other messages, our own name."""
    broker = MemoryBroker()
    side, bus = Side(broker, A), broker.connect()
    await side.meeting.start()
    for data in (b"noise", codec.encode(Meet(A, (), "00" * TOKEN, encrypted=False))):
        assert await bus.request(subjects.peer(A, "meet"), data, 5) == b""
    assert side.port.dropped.total() == 2
    await side.close()


async def test_strangers_are_few() -> None:
    """The one that waits longest goes when there are too many."""
    side = Side(MemoryBroker(), A)
    await side.meeting.start()
    (address,) = side.meeting._addresses()
    writers = [(await asyncio.open_connection(*address))[1] for _ in range(STRANGERS + 3)]
    await until(lambda: len(side.lost_links) == 3)
    assert len(side.meeting._strangers) == STRANGERS
    await side.close()
    for writer in writers:
        writer.close()
        with suppress(ConnectionResetError):
            await writer.wait_closed()


async def test_we_listen_where_the_bus_reaches_us() -> None:
    """On loopback only if the server is here; otherwise everywhere, and loopback is named last."""
    here, abroad = Side(MemoryBroker(), A, PLAIN), Side(MemoryBroker(), A, Way("192.0.2.1", encrypted=False))
    await here.meeting.start()
    await abroad.meeting.start()
    assert {host for host, _ in here.meeting._addresses()} == {"127.0.0.1"}
    hosts = [host for host, _ in abroad.meeting._addresses()]
    assert "127.0.0.1" in hosts
    local = [host in ("127.0.0.1", "::1") for host in hosts]
    assert local == sorted(local)
    for host, port in abroad.meeting._addresses():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            assert probe.connect_ex((host, port)) == 0
    await here.close()
    await abroad.close()


@pytest.mark.usefixtures("quick")
async def test_a_peer_that_is_not_sought_any_more_is_let_go() -> None:
    """And sought again later."""
    broker = MemoryBroker()
    sides = [Side(broker, A), Side(broker, B)]
    await started(*sides)
    await sides[0].meeting.met(B)
    for side in sides:
        side.meeting.seek([])
    await until(lambda: sides[0].meeting.link(B) is None and sides[1].meeting.link(A) is None)
    sides[1].meeting.seek([A])
    await sides[0].meeting.met(B)
    for side in sides:
        await side.close()
