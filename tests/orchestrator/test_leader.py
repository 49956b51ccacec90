"""The lease, with candidates on one bucket and a clock that is moved by hand."""

from __future__ import annotations

import asyncio

import pytest

from dcnr.bus.base import KeyConflict
from dcnr.bus.memory import MemoryBroker, MemoryKv
from dcnr.clock import ManualClock
from dcnr.errors import WorldError
from dcnr.orchestrator.leader import EXPIRES_AFTER, GIVE_UP_AFTER, KEY, Lease, LeaseLost


class Cut(MemoryKv):
    """A bucket whose server can be cut off, before or after it took a write."""

    def __init__(self) -> None:
        super().__init__()
        self.cut: str | None = None

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Fail as a broken connection does."""
        if self.cut == "before":
            raise WorldError("no answer")
        revision = await super().update(key, value, revision)
        if self.cut == "after":
            raise WorldError("no answer")
        return revision


def test_of_two_candidates_one_leads() -> None:
    """The second is refused as long as the first renews."""

    async def story() -> None:
        kv, clock = MemoryKv(), ManualClock()
        first, second = Lease(kv, "one", clock), Lease(kv, "two", clock)
        assert await first._try()
        for _ in range(20):
            assert not await second._try()
            clock.advance(1.0)
            await first._renew()

    asyncio.run(story())


def test_a_follower_takes_over_after_five_seconds_of_an_unchanged_revision() -> None:
    """By its own clock, counted from when it first saw the revision; the old leader then finds out."""

    async def story() -> None:
        kv, clock = MemoryKv(), ManualClock()
        first, second = Lease(kv, "one", clock), Lease(kv, "two", clock)
        assert await first._try()
        clock.advance(100.0)
        assert not await second._try()
        clock.advance(EXPIRES_AFTER - 0.1)
        assert not await second._try()
        clock.advance(0.1)
        assert await second._try()
        with pytest.raises(LeaseLost, match="another orchestrator"):
            await first._renew()

    asyncio.run(story())


def test_a_released_lease_is_taken_at_once() -> None:
    """An orderly restart costs no time-out; releasing what is not ours changes nothing."""

    async def story() -> None:
        kv, clock = MemoryKv(), ManualClock()
        first, second = Lease(kv, "one", clock), Lease(kv, "two", clock)
        await first._try()
        await second.release()
        assert not await second._try()
        await first.release()
        assert await second._try()

    asyncio.run(story())


def test_a_renewal_that_was_applied_although_it_timed_out_is_still_ours() -> None:
    """The conflict of the next one is looked into."""

    async def story() -> None:
        kv, clock = Cut(), ManualClock()
        lease = Lease(kv, "one", clock)
        await lease._try()
        kv.cut = "after"
        await lease._renew()
        kv.cut = None
        await lease._renew()
        await lease._renew()

    asyncio.run(story())


def test_a_leader_that_cannot_renew_gives_up_before_a_follower_may_take_over() -> None:
    """Four seconds against five."""
    assert GIVE_UP_AFTER < EXPIRES_AFTER

    async def story() -> None:
        kv, clock = Cut(), ManualClock()
        lease = Lease(kv, "one", clock)
        await lease._try()
        kv.cut = "before"
        clock.advance(GIVE_UP_AFTER - 0.1)
        await lease._renew()
        clock.advance(0.1)
        with pytest.raises(LeaseLost, match="could not be renewed"):
            await lease._renew()

    asyncio.run(story())


def test_a_race_for_a_new_lease_has_one_winner() -> None:
    """Create is the arbiter."""

    async def story() -> None:
        kv = await MemoryBroker().connect().kv("dcnr_leader")
        leases = [Lease(kv, str(number), ManualClock()) for number in range(10)]
        assert sum(await asyncio.gather(*(lease._try() for lease in leases))) == 1
        entry = await kv.get(KEY)
        assert entry is not None
        with pytest.raises(KeyConflict):
            await kv.create(KEY, b"")

    asyncio.run(story())
