"""What waits to leave: in order, within bounds, and until it is taken."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dcnr.bus.messages import TRAINER, Hop
from dcnr.errors import WorldError
from dcnr.ids import Epoch, NetworkId, NodeId, PNodeId
from dcnr.orchestrator.commands import Bucket, SendHop
from dcnr.orchestrator.leader import LeaseLost
from dcnr.orchestrator.outbox import Hops, Outbox, RecordWriter
from dcnr.orchestrator.state import NetworkRecord, Record
from dcnr.orchestrator.store import Store
from tests.orchestrator.fakes import SESSION
from tests.orchestrator.running import PATIENCE


async def all_of(outbox: Outbox, count: int) -> list[str]:
    """The subjects of the next `count` messages."""
    return [(await outbox.get())[0] for _ in range(count)]


async def test_messages_leave_in_their_order() -> None:
    """Whoever waits gets the first one at once."""
    outbox = Outbox()
    waiting = asyncio.create_task(all_of(outbox, 3))
    await asyncio.sleep(0)
    for subject in "abc":
        outbox.put(subject, b"x", metric=subject == "b")
    async with asyncio.timeout(PATIENCE):
        assert await waiting == ["a", "b", "c"]


async def test_when_too_much_waits_metrics_go_first_and_then_the_oldest() -> None:
    """The newest always stays, however large it is; what is dropped is counted."""
    outbox = Outbox(limit=40)
    for subject, metric in (("a", False), ("m1", True), ("b", False), ("m2", True), ("c", False)):
        outbox.put(subject, bytes(10), metric)
    assert outbox.dropped == 1
    assert await all_of(outbox, 1) == ["a"]
    outbox.put("d", bytes(10))
    outbox.put("e", bytes(10))
    assert await all_of(outbox, 4) == ["b", "c", "d", "e"]
    outbox.put("f", bytes(10))
    outbox.put("g", bytes(100))
    assert await all_of(outbox, 1) == ["g"]
    assert outbox.dropped == 3


def hop(step: int) -> SendHop:
    """A hop of 80 bytes."""
    payload = np.zeros(10, np.int64)
    header = Hop(
        NetworkId("n"), SESSION, Epoch(1), step, 0, 0, "fwd", TRAINER, 0, ((NodeId("a"), 0),), PNodeId("o"), "int64", payload.shape, 0.0
    )  # fmt: skip
    return SendHop(PNodeId("a"), header, payload)


async def test_hops_to_a_pnode_that_takes_none_are_bounded() -> None:
    """The oldest are of the least use: their step is fed again by then."""
    hops = Hops(limit=200)
    for step in range(1, 6):
        hops.put(hop(step))
    assert [(await hops.get()).hop.step for _ in range(2)] == [4, 5]
    assert hops.dropped == 3


class Unwilling(Store):
    """A store that fails `failures` times, and remembers what it took."""

    def __init__(self, failures: int) -> None:
        super().__init__({}, 1)
        self.failures = failures
        self.taken: list[int | str] = []

    async def put(self, record: Record) -> None:
        """Fail, or take the record."""
        self._fail()
        assert isinstance(record, NetworkRecord)
        self.taken.append(record.revision)

    async def drop(self, bucket: Bucket, key: str) -> None:
        """Fail, or take the removal."""
        self._fail()
        self.taken.append(f"no {bucket}/{key}")

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise WorldError("no answer")


def network(revision: int) -> NetworkRecord:
    """One record."""
    return NetworkRecord(NetworkId("small"), "", "", 1, 1, revision)


def allowed() -> None:
    """We lead."""


async def test_a_record_is_written_again_until_the_bus_takes_it_and_only_its_newest_value() -> None:
    """Three changes while the bus is away are one write; a removal is one too."""
    store = Unwilling(failures=1)
    writer = RecordWriter(store, allowed)
    for revision in (1, 2, 3):
        writer.put(network(revision))
    task = asyncio.create_task(writer.run())
    async with asyncio.timeout(PATIENCE):
        await writer.settled()
        writer.put(network(4))
        writer.drop("dcnr_networks", "small")
        await writer.settled()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert store.taken == [3, "no dcnr_networks/small"]


async def test_nobody_waits_for_a_record_that_will_not_be_written() -> None:
    """An orchestrator that stops says so to whoever asked last."""
    writer = RecordWriter(Unwilling(failures=1000), allowed)
    writer.put(network(1))
    waiting = asyncio.create_task(writer.settled())
    await asyncio.sleep(0)
    writer.give_up()
    with pytest.raises(WorldError, match="before everything was written"):
        await waiting


async def test_nothing_is_written_by_one_that_may_not_lead_any_more() -> None:
    """Each record is preceded by a look at the lease."""
    store = Unwilling(failures=0)

    def too_old() -> None:
        raise LeaseLost("too old")

    writer = RecordWriter(store, too_old)
    writer.put(network(1))
    with pytest.raises(LeaseLost):
        await writer.run()
    assert store.taken == []
