"""What every Bus and Kv must do. `test_memory` and `test_nats` run the same cases on their own connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count

import pytest

from dcnr.bus.base import BucketGone, Bus, Entry, KeyConflict
from dcnr.errors import BusUnavailable, UserError, WorldError

Connect = Callable[[], Awaitable[Bus]]

_names = count()


def fresh(prefix: str) -> str:
    """A name that no other test uses."""
    return f"{prefix}{next(_names)}"


async def until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    """Wait for `condition`; fail after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


class BusContract:
    """Subclasses provide the fixture `connect`."""

    async def test_a_subscriber_gets_messages_of_a_publisher_in_order(self, connect: Connect) -> None:
        """One subject, many messages, one publisher."""
        bus, other, got = await connect(), await connect(), list[bytes]()
        subject = fresh("order.")
        await bus.subscribe(subject, got.append)
        sent = [b"%d" % i for i in range(500)]
        for data in sent:
            await other.publish(subject, data)
        await until(lambda: len(got) == len(sent))
        assert got == sent

    @pytest.mark.parametrize(
        ("pattern", "heard"),
        [("a.*.c", {"a.b.c"}), ("a.>", {"a.b", "a.b.c", "a.b.d.e"}), ("a.b", {"a.b"}), ("*.b.>", {"a.b.c", "a.b.d.e"}), ("*", set())],
    )
    async def test_wildcards_mean_what_they_mean_in_nats(self, connect: Connect, pattern: str, heard: set[str]) -> None:
        """`*` is one token, `>` is one or more at the end."""
        bus, got, root = await connect(), list[bytes](), fresh("wild")
        await bus.subscribe(f"{root}.{pattern}", got.append)
        await bus.subscribe(f"{root}.end", got.append)
        for subject in ("a", "a.b", "a.b.c", "a.b.d.e", "x.y"):
            if pattern != "*" or "." in subject:
                await bus.publish(f"{root}.{subject}", subject.encode())
        await bus.publish(f"{root}.end", b"end")
        await until(lambda: b"end" in got)
        assert {data.decode() for data in got} == heard | {"end"}

    async def test_every_subscription_gets_its_copy(self, connect: Connect) -> None:
        """Two interests of one client and one of another."""
        bus, other, subject = await connect(), await connect(), fresh("copies.")
        got: list[list[bytes]] = [[], [], []]
        await bus.subscribe(subject, got[0].append)
        await bus.subscribe(subject, got[1].append)
        await other.subscribe(subject, got[2].append)
        await bus.publish(subject, b"x")
        await until(lambda: all(got))
        assert got == [[b"x"]] * 3

    async def test_no_callback_after_stop(self, connect: Connect) -> None:
        """What was on its way when `stop` returned is dropped."""
        bus, subject, got, control = await connect(), fresh("stop."), list[bytes](), list[bytes]()
        subscription = await bus.subscribe(subject, got.append)
        await bus.subscribe(subject, control.append)
        await bus.publish(subject, b"1")
        await until(lambda: bool(got))
        for _ in range(50):
            await bus.publish(subject, b"late")
        await subscription.stop()
        await subscription.stop()
        seen = len(got)
        await until(lambda: len(control) == 51)
        assert len(got) == seen

    async def test_a_request_gets_its_answer_and_requests_run_concurrently(self, connect: Connect) -> None:
        """The first request is answered after the second, which only works if they run side by side."""
        bus, client, subject = await connect(), await connect(), fresh("ask.")
        second = asyncio.Event()

        async def handler(data: bytes) -> bytes:
            if data == b"first":
                await second.wait()
            second.set()
            return data.upper()

        await bus.serve(subject, handler)
        answers = await asyncio.gather(client.request(subject, b"first", 5), client.request(subject, b"second", 5))
        assert list(answers) == [b"FIRST", b"SECOND"]

    async def test_a_request_that_nobody_serves_fails_at_once(self, connect: Connect) -> None:
        """No waiting for the time-out."""
        bus = await connect()
        with pytest.raises(BusUnavailable):
            async with asyncio.timeout(2):
                await bus.request(fresh("nobody."), b"", 30)

    async def test_a_request_without_answer_times_out(self, connect: Connect) -> None:
        """As `WorldError`."""
        bus, subject = await connect(), fresh("silent.")
        await bus.subscribe(subject, lambda _: None)
        with pytest.raises(WorldError, match="no answer"):
            await bus.request(subject, b"", 0.05)

    async def test_the_largest_message_passes_and_a_larger_one_is_refused(self, connect: Connect) -> None:
        """Refused at the sender, whose connection goes on working."""
        bus, subject, got = await connect(), fresh("large."), list[bytes]()
        await bus.subscribe(subject, got.append)
        with pytest.raises(UserError, match="max_payload"):
            await bus.publish(subject, bytes(bus.max_payload + 1))
        with pytest.raises(UserError, match="max_payload"):
            await bus.request(subject, bytes(bus.max_payload + 1), 1)
        await bus.publish(subject, bytes(bus.max_payload))
        await until(lambda: bool(got))
        assert len(got[0]) == bus.max_payload

    async def test_close_delivers_what_was_published_and_is_repeatable(self, connect: Connect) -> None:
        """And nothing can be sent afterwards."""
        bus, other, subject, got = await connect(), await connect(), fresh("bye."), list[bytes]()
        await other.subscribe(subject, got.append)
        for i in range(100):
            await bus.publish(subject, b"%d" % i)
        await bus.close()
        await bus.close()
        await until(lambda: len(got) == 100)
        with pytest.raises(WorldError):
            await bus.publish(subject, b"")

    async def test_kv_reads_what_was_written_and_revisions_grow(self, connect: Connect) -> None:
        """Seen by every client."""
        bucket = fresh("kv")
        one, two = await (await connect()).kv(bucket), await (await connect()).kv(bucket)
        assert await one.get("a") is None
        first = await one.put("a", b"1")
        second = await one.put("a", b"2")
        assert second > first
        assert await two.get("a") == Entry("a", b"2", second)

    async def test_kv_create_and_update_have_one_winner(self, connect: Connect) -> None:
        """Compare and set is what leases stand on."""
        kv = await (await connect()).kv(fresh("cas"))
        revision = await kv.create("lease", b"x")
        with pytest.raises(KeyConflict):
            await kv.create("lease", b"y")
        with pytest.raises(KeyConflict):
            await kv.update("absent", b"y", 7)
        results = await asyncio.gather(*(kv.update("lease", b"%d" % i, revision) for i in range(10)), return_exceptions=True)
        assert sum(isinstance(result, int) for result in results) == 1
        assert sum(isinstance(result, KeyConflict) for result in results) == 9

    async def test_kv_deleted_keys_are_absent_and_can_be_created_again(self, connect: Connect) -> None:
        """Deleting twice, and what never was, is fine."""
        kv = await (await connect()).kv(fresh("del"))
        first = await kv.put("a", b"1")
        await kv.put("b", b"")
        for _ in range(2):
            await kv.delete("a")
        await kv.delete("never")
        assert await kv.get("a") is None
        assert [entry.key for entry in await kv.entries()] == ["b"]
        with pytest.raises(KeyConflict):
            await kv.update("a", b"2", first)
        assert await kv.create("a", b"3") > first
        assert [(entry.key, entry.value) for entry in await kv.entries()] == [("a", b"3"), ("b", b"")]

    async def test_kv_deletes_exactly_the_revision_that_was_seen(self, connect: Connect) -> None:
        """Somebody else's newer value stays; one that is deleted already stays deleted."""
        kv = await (await connect()).kv(fresh("cad"))
        first = await kv.put("a", b"1")
        second = await kv.put("a", b"2")
        with pytest.raises(KeyConflict):
            await kv.delete("a", first)
        assert await kv.get("a") == Entry("a", b"2", second)
        for _ in range(2):
            await kv.delete("a", second)
            assert await kv.get("a") is None
        await kv.delete("never", 7)

    async def test_kv_can_be_opened_without_making_it(self, connect: Connect) -> None:
        """One that is not there is an error, and still not there afterwards; one that is there says on how many servers."""
        bus, bucket = await connect(), fresh("absent")
        for _ in range(2):
            with pytest.raises(BucketGone, match=bucket):
                await bus.kv(bucket, make=False)
        assert (await bus.kv(bucket)).replicas == 1
        assert (await bus.kv(bucket, make=False)).replicas == 1

    async def test_kv_entries_of_an_empty_bucket(self, connect: Connect) -> None:
        """None."""
        assert await (await (await connect()).kv(fresh("empty"))).entries() == []
