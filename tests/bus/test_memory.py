"""The in-memory bus keeps the contract, and matches subjects as NATS does."""

from __future__ import annotations

import pytest

from dcnr.bus.base import Bus
from dcnr.bus.memory import MemoryBroker, matches
from dcnr.errors import WorldError
from tests.bus.contract import BusContract, Connect, until


class TestMemoryBus(BusContract):
    """The common cases."""

    @pytest.fixture
    def connect(self) -> Connect:
        """Clients of one broker."""
        broker = MemoryBroker()

        async def connect() -> Bus:
            return broker.connect()

        return connect


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [("a.b", "a.b", True), ("a.b", "a.b.c", False), ("a.*", "a", False), ("a.>", "a", False), (">", "a.b", True), ("*.*", "a.b", True)],
)
def test_matches(pattern: str, subject: str, expected: bool) -> None:
    """The corners of wildcards."""
    assert matches(pattern, subject) is expected


async def test_delivery_is_in_publishing_order_across_subjects() -> None:
    """Simulations count on it."""
    bus, got = MemoryBroker().connect(), list[bytes]()
    await bus.subscribe("a", got.append)
    await bus.subscribe("b", got.append)
    for i in range(10):
        await bus.publish("ab"[i % 2], b"%d" % i)
    await bus.close()
    assert got == [b"%d" % i for i in range(10)]


async def test_a_fate_loses_repeats_and_delays() -> None:
    """By who sends what to whom; without one, nothing happens to messages."""
    broker, got = MemoryBroker(), list[bytes]()
    one, two = broker.connect("one"), broker.connect("two")
    await two.subscribe("x", got.append)
    asked = list[tuple[str, str, str, bytes]]()

    def fate(sender: str, receiver: str, subject: str, data: bytes) -> tuple[float, ...]:
        asked.append((sender, receiver, subject, data))
        return {b"lost": (), b"twice": (0.0, 0.0), b"late": (0.01,)}.get(data, (0.0,))

    broker.fate = fate
    for data in (b"lost", b"late", b"twice", b"plain"):
        await one.publish("x", data)
    await until(lambda: len(got) == 4)
    assert got == [b"twice", b"twice", b"plain", b"late"]
    assert asked[0] == ("one", "two", "x", b"lost")
    with pytest.raises(WorldError, match="no answer"):
        await one.request("x", b"lost", 0.01)
