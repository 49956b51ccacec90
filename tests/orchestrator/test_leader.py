"""The lease: candidates on one bucket and a clock that is moved by hand, and on a cluster whose leader is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from dcnr.bus import codec
from dcnr.bus.base import BucketGone, Entry, KeyConflict
from dcnr.bus.memory import MemoryBroker, MemoryKv
from dcnr.bus.nats import connect
from dcnr.clock import ManualClock, MonotonicClock
from dcnr.errors import PeerError, WorldError
from dcnr.orchestrator.leader import AGAIN_AFTER, BUCKET, KEY, ONE_SERVER, SEVERAL_SERVERS, Holder, Lease, LeaseLost, _this_process, gone
from tests.bus.clusters import jetstream, nats_cluster


class Cut(MemoryKv):
    """A bucket whose server can be cut off, before or after it took a write; or it never answers, or has lost the bucket."""

    def __init__(self, replicas: int = 1) -> None:
        super().__init__()
        self.replicas = replicas
        self.cut: str | None = None
        self.refused = 0

    async def get(self, key: str) -> Entry | None:
        """Answer if there is a bucket."""
        if self.cut == "gone":
            raise BucketGone("no bucket")
        return await super().get(key)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Fail as a broken connection does."""
        if self.cut == "silent":
            await asyncio.Event().wait()
        if self.cut in ("before", "gone"):
            self.refused += 1
            raise WorldError("no answer")
        revision = await super().update(key, value, revision)
        if self.cut == "after":
            raise WorldError("no answer")
        return revision


async def test_of_two_candidates_one_leads() -> None:
    """The second is refused as long as the first renews."""
    kv, clock = MemoryKv(), ManualClock()
    first, second = Lease(kv, "one", clock), Lease(kv, "two", clock)
    assert await first._try()
    for _ in range(20):
        assert not await second._try()
        clock.advance(1.0)
        await first._renew()


async def test_a_term_has_one_number_which_is_larger_than_those_before() -> None:
    """Renewals do not change it; whoever takes the lease again has a new one."""
    kv, clock = MemoryKv(), ManualClock()
    first, second = Lease(kv, "one", clock), Lease(kv, "two", clock)
    assert first.term == 0
    await first._try()
    terms = [first.term]
    for _ in range(3):
        await first._renew()
        assert first.term == terms[0]
    for holder, candidate in ((first, first), (first, second), (second, first)):
        await holder.release()
        assert await candidate._try()
        terms.append(candidate.term)
    assert terms == sorted(set(terms))


async def test_a_follower_takes_over_after_five_seconds_of_an_unchanged_revision() -> None:
    """By its own clock, counted from when it first saw the revision; the old leader then finds out."""
    kv, clock = MemoryKv(), ManualClock()
    first, second = Lease(kv, "one", clock), Lease(kv, "two", clock)
    assert await first._try()
    clock.advance(100.0)
    assert not await second._try()
    clock.advance(ONE_SERVER.expires - 0.1)
    assert not await second._try()
    clock.advance(0.1)
    assert await second._try()
    with pytest.raises(LeaseLost, match="another orchestrator"):
        await first._renew()


async def test_a_bucket_on_several_servers_makes_everything_take_longer() -> None:
    """Longer than the longest election that was measured; a leader still gives up before a follower takes over."""
    longest_election = 9.0
    for timing in (ONE_SERVER, SEVERAL_SERVERS):
        assert timing.renew < timing.give_up < timing.expires
    assert longest_election + SEVERAL_SERVERS.renew < SEVERAL_SERVERS.give_up
    kv, clock = Cut(replicas=3), ManualClock()
    first, second = Lease(kv, "one", clock), Lease(kv, "two", clock)
    await first._try()
    await second._try()
    kv.cut = "before"
    clock.advance(SEVERAL_SERVERS.give_up - 0.1)
    await first._renew()
    first.check()
    clock.advance(0.1)
    with pytest.raises(LeaseLost, match="could not be renewed for 12 s"):
        await first._renew()
    kv.cut = None
    assert not await second._try()
    clock.advance(SEVERAL_SERVERS.expires - SEVERAL_SERVERS.give_up)
    assert await second._try()


async def test_a_released_lease_is_taken_at_once() -> None:
    """An orderly restart costs no time-out; releasing what is not ours changes nothing."""
    kv, clock = MemoryKv(), ManualClock()
    first, second = Lease(kv, "one", clock), Lease(kv, "two", clock)
    await first._try()
    await second.release()
    assert not await second._try()
    await first.release()
    assert await second._try()


async def test_a_renewal_that_was_applied_although_it_timed_out_is_still_ours() -> None:
    """The conflict of the next one is looked into."""
    kv, clock = Cut(), ManualClock()
    lease = Lease(kv, "one", clock)
    await lease._try()
    kv.cut = "after"
    await lease._renew()
    kv.cut = None
    await lease._renew()
    await lease._renew()


async def test_a_renewal_that_gets_no_answer_does_not_use_up_the_time_of_the_next_ones() -> None:
    """A request that was lost with a server that is back by now."""
    kv, clock = Cut(), ManualClock()
    lease = Lease(kv, "one", clock)
    await lease._try()
    kv.cut = "silent"
    async with asyncio.timeout(2 * ONE_SERVER.renew):
        assert not await lease._renew()
    kv.cut = None
    assert await lease._renew()


async def test_a_renewal_that_failed_is_tried_again_soon() -> None:
    """Several times before the next one would have been due: an election that ends just before the time is up must not cost the lease."""
    kv, clock = Cut(replicas=3), ManualClock()
    lease = Lease(kv, "one", clock)
    await lease.acquire()
    kv.cut = "before"
    keeping = asyncio.create_task(lease.keep())
    async with asyncio.timeout(SEVERAL_SERVERS.renew + 10 * AGAIN_AFTER):
        while kv.refused < 3:
            await asyncio.sleep(0.01)
        before = lease._revision
        kv.cut = None
        while lease._revision == before:
            await asyncio.sleep(0.01)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_leader_that_cannot_renew_gives_up_before_a_follower_may_take_over() -> None:
    """Four seconds against five."""
    kv, clock = Cut(), ManualClock()
    lease = Lease(kv, "one", clock)
    await lease._try()
    kv.cut = "before"
    clock.advance(ONE_SERVER.give_up - 0.1)
    await lease._renew()
    clock.advance(0.1)
    with pytest.raises(LeaseLost, match="could not be renewed for 4 s: no answer"):
        await lease._renew()


async def test_a_leader_that_was_stopped_for_long_knows_it_before_it_does_anything() -> None:
    """Even if nobody took the lease meanwhile, and before the next renewal."""
    kv, clock = MemoryKv(), ManualClock()
    lease = Lease(kv, "one", clock)
    await lease._try()
    clock.advance(ONE_SERVER.give_up - 0.1)
    lease.check()
    clock.advance(20.0)
    with pytest.raises(LeaseLost, match="not renewed for 4 s"):
        lease.check()


async def test_a_lease_whose_bucket_is_gone_is_lost_at_once() -> None:
    """For a leader and a follower alike: a write alone gets no answer, and would be tried until the time is up."""
    kv, clock = Cut(), ManualClock()
    first, second = Lease(kv, "one", clock), Lease(kv, "two", clock)
    await first._try()
    kv.cut = "gone"
    with pytest.raises(LeaseLost, match=f"bucket {BUCKET} is gone"):
        await first._renew()
    with pytest.raises(LeaseLost, match=f"bucket {BUCKET} is gone"):
        await second._try()


async def test_a_race_for_a_new_lease_has_one_winner() -> None:
    """Create is the arbiter."""
    kv = await MemoryBroker().connect().kv("dcnr_leader")
    leases = [Lease(kv, str(number), ManualClock()) for number in range(10)]
    assert sum(await asyncio.gather(*(lease._try() for lease in leases))) == 1
    entry = await kv.get(KEY)
    assert entry is not None
    with pytest.raises(KeyConflict):
        await kv.create(KEY, b"")


# -- whether the holder still runs -----------------------------------------------------------------------------------------


def idle_process() -> subprocess.Popen[bytes]:
    """One that does nothing."""
    return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)


def holder_of(pid: int, started: float) -> Holder:
    """A holder on this host."""
    host, _, _ = _this_process()
    return Holder("dead", 0.0, host, pid, started)


async def test_the_lease_of_a_killed_process_of_this_host_is_taken_at_once() -> None:
    """Long before it expires; as long as that process runs, it is not."""
    process = idle_process()
    kv = MemoryKv()
    value = codec.pack(asdict(holder_of(process.pid, psutil.Process(process.pid).create_time())))
    await kv.put(KEY, value)
    lease = Lease(kv, "heir", ManualClock())
    assert not await lease._try()
    process.kill()
    process.communicate()
    assert await lease._try()


def test_a_process_that_ended_and_has_not_been_waited_for_is_gone() -> None:
    """It has its number still, and does nothing."""
    process = idle_process()
    holder = holder_of(process.pid, psutil.Process(process.pid).create_time())
    assert not gone(holder)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert gone(holder)
    process.communicate()


def test_a_number_that_another_process_has_by_now_is_nobody() -> None:
    """Told by the time of its start; a process of another host is never called gone."""
    host, pid, started = _this_process()
    assert not gone(Holder("x", 0.0, host, pid, started))
    assert gone(Holder("x", 0.0, host, pid, started - 3600))
    assert not gone(replace(holder_of(pid, started - 3600), host="another"))
    assert not gone(Holder("of an earlier version", 0.0))


@pytest.mark.parametrize("value", [b"", b"\xc1", codec.pack({"id": 7}), codec.pack({"id": "x", "time": 0.0, "pid": "no"})])
async def test_a_value_that_is_no_lease_is_an_error(value: bytes) -> None:
    """Somebody else writes there."""
    kv = MemoryKv()
    await kv.put(KEY, value)
    with pytest.raises(PeerError):
        await Lease(kv, "one", ManualClock())._try()


# -- a cluster of servers --------------------------------------------------------------------------------------------------


@pytest.mark.nats
@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_lease_survives_the_death_of_the_server_that_leads_its_bucket(tmp_path: Path) -> None:
    """Writes pause for seconds; the leader keeps its term, and no follower takes over meanwhile."""
    async with nats_cluster(tmp_path, 3, jetstream) as servers:
        ours, theirs = await connect(servers.url(0, 1, 2), "ours"), await connect(servers.url(0, 1, 2), "theirs")
        kv = await ours.kv(BUCKET)
        assert kv.replicas == 3
        lease, follower = Lease(kv, "one", MonotonicClock()), Lease(await theirs.kv(BUCKET), "two", MonotonicClock())
        await lease.acquire()
        keeping, following = asyncio.create_task(lease.keep()), asyncio.create_task(follower.acquire())
        before = await kv.get(KEY)
        assert before is not None
        servers.end(await servers.leader_of(f"KV_{BUCKET}"), signal.SIGKILL)
        killed_at = time.monotonic()
        renewed = 0
        while renewed < 3:
            await asyncio.sleep(0.2)
            assert not keeping.done(), keeping.exception()
            lease.check()
            assert not following.done()
            assert time.monotonic() - killed_at < 60
            renewed = lease._revision - before.revision
        for task in (keeping, following):
            task.cancel()
        await asyncio.gather(keeping, following, return_exceptions=True)
        await ours.close()
        await theirs.close()
