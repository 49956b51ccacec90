"""The in-memory bus keeps the contract, and matches subjects as NATS does."""

from __future__ import annotations

import pytest

from dcnr.bus.base import Bus
from dcnr.bus.memory import MemoryBroker, matches
from tests.bus.contract import BusContract, Connect


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
