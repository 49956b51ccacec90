"""What the common contract does not see: markers of expired keys, buckets made by others, servers without JetStream."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import cast

import nats
import nats.errors
import pytest
from nats.js.api import KeyValueConfig, StreamConfig, StreamInfo, StreamState
from nats.js.client import JetStreamContext
from nats.js.errors import BadRequestError, NotFoundError, ServerError, ServiceUnavailableError
from nats.js.kv import KeyValue

from dcnr.bus import nats_kv
from dcnr.bus.base import BucketGone, Kv
from dcnr.bus.nats import connect
from dcnr.bus.nats_kv import open_bucket
from dcnr.bus.server import find_binary
from dcnr.errors import UserError, WorldError
from tests.bus.clusters import jetstream, nats_cluster
from tests.bus.contract import until


def plain_server(ports: Path) -> subprocess.Popen[bytes]:
    """A server with nothing switched on."""
    command = [str(find_binary(os.environ)), "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", str(ports)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def test_an_expired_keys_marker_is_an_absent_key(nats_url: str) -> None:
    """nats-py's own `get` shows an entry without a value. An empty value is a value."""
    client = await nats.connect(nats_url)
    theirs = await client.jetstream().create_key_value(KeyValueConfig("expiring", limit_marker_ttl=60))
    await theirs.create("lease", b"x", msg_ttl=1)
    await theirs.put("empty", b"")
    bus = await connect(nats_url, "t")
    kv = await bus.kv("expiring")
    assert await kv.get("lease") is not None
    async with asyncio.timeout(5):
        while await kv.get("lease") is not None:
            await asyncio.sleep(0.05)
    assert [(entry.key, entry.value) for entry in await kv.entries()] == [("empty", b"")]
    await bus.close()
    await client.close()


async def test_a_key_that_is_none_is_refused(nats_url: str) -> None:
    """Wildcards and spaces."""
    bus = await connect(nats_url, "t")
    kv = await bus.kv("names")
    with pytest.raises(UserError, match="not a valid key"):
        await kv.put("a b", b"")
    await bus.close()


async def test_a_write_that_is_cancelled_ends_so_even_if_the_answer_comes_in_the_same_moment(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that gives up must not go on renewing its lease."""
    bus = await connect(nats_url, "test")
    kv = await bus.kv("swallowed")
    revision = await kv.create("key", b"1")

    async def swallowing(*_: object, **__: object) -> int:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return revision + 1

    monkeypatch.setattr(KeyValue, "update", swallowing)
    task = asyncio.create_task(kv.update("key", b"2", revision))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await bus.close()


async def test_a_bucket_that_vanished_is_told_from_a_key_that_is_absent(nats_url: str) -> None:
    """By whatever reads; a write alone gets no answer, and may have been applied for all that is known."""
    client = await nats.connect(nats_url)
    bus = await connect(nats_url, "t")
    kv = await bus.kv("vanishing")
    assert await kv.get("key") is None
    await client.jetstream().delete_key_value("vanishing")
    with pytest.raises(BucketGone, match="vanishing"):
        await kv.get("key")
    with pytest.raises(BucketGone, match="vanishing"):
        await kv.entries()
    with pytest.raises(WorldError, match="vanishing"):
        await kv.put("key", b"")
    await bus.close()
    await client.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_buckets_of_a_cluster_are_kept_on_three_servers_from_its_first_second_on(tmp_path: Path) -> None:
    """Its servers may not know each other yet when the first client asks. One server may die, and writes go on after an election."""
    async with nats_cluster(tmp_path, 3, jetstream) as servers:
        bus = await connect(servers.url(0, 1, 2), "t")
        kv = await bus.kv("first")
        assert kv.replicas == 3
        before = await kv.put("key", b"value")
        servers.end(await servers.leader_of("KV_first"), signal.SIGKILL)
        async with asyncio.timeout(30):
            while not (written := await _put(kv)):
                await asyncio.sleep(0.1)
        assert written > before
        assert (await bus.kv("first", make=False)).replicas == 3
        await bus.close()


async def _put(kv: Kv) -> int:
    try:
        return await kv.put("key", b"newer")
    except WorldError:
        return 0


async def test_a_bucket_that_exists_stays_as_it_is(nats_url: str) -> None:
    """Also if it was made with other settings; changing them is known to break buckets."""
    client = await nats.connect(nats_url)
    await client.jetstream().create_key_value(KeyValueConfig("older", history=5))
    bus = await connect(nats_url, "t")
    assert (await bus.kv("older")).replicas == 1
    assert (await client.jetstream().stream_info("KV_older")).config.max_msgs_per_subject == 5
    await bus.close()
    await client.close()


class Cluster:
    """A JetStream that answers `answers` in turn to whoever wants to make a bucket, and then makes it."""

    def __init__(self, *answers: Exception) -> None:
        self._answers = list(answers)
        self.asked: list[int] = []

    async def stream_info(self, _name: str) -> StreamInfo:
        """Of the bucket, once it is made."""
        if self._answers or not self.asked:
            raise NotFoundError(code=404, err_code=10059)
        state = StreamState(messages=0, bytes=0, first_seq=0, last_seq=0, consumer_count=0)
        return StreamInfo(StreamConfig(num_replicas=self.asked[-1]), state)

    async def create_key_value(self, config: KeyValueConfig) -> None:
        """One more answer; one copy is always possible."""
        self.asked.append(config.replicas or 1)
        if config.replicas == 1:
            self._answers.clear()
        if self._answers:
            raise self._answers.pop(0)


ALONE = ServerError(code=500, err_code=10074)
NO_LEADER = ServiceUnavailableError(code=503, err_code=10008)
TOO_FEW = BadRequestError(code=400, err_code=10005)


@pytest.mark.parametrize(
    ("answers", "replicas"),
    [
        ((), 3),
        ((NO_LEADER, nats.errors.TimeoutError(), NO_LEADER), 3),
        ((TOO_FEW, TOO_FEW), 3),
        ((ALONE,), 1),
        ((TOO_FEW,) * 50, 1),
    ],
    ids=["a cluster", "one that has just started", "one that does not know all its servers yet", "one server", "two servers"],
)
async def test_the_server_says_how_many_copies_there_can_be(
    answers: tuple[Exception, ...], replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three if ever it says so: a bucket that was made with less stays with less."""
    monkeypatch.setattr(nats_kv, "_ASK_AGAIN", 0.01)
    monkeypatch.setattr(nats_kv, "NEIGHBOURS_WITHIN", 0.2)
    cluster = Cluster(*answers)
    kv = await open_bucket(lambda: cast("JetStreamContext", cluster), "b")
    assert (kv.replicas, set(cluster.asked[:-1])) == (replicas, {3} if answers else set())


async def test_servers_that_never_get_ready_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three that have not found each other, for instance."""
    monkeypatch.setattr(nats_kv, "_ASK_AGAIN", 0.01)
    monkeypatch.setattr(nats_kv, "READY_WITHIN", 0.2)
    cluster = Cluster(*[NO_LEADER] * 1000)
    with pytest.raises(WorldError, match=r"bucket b: JetStream was not ready within 0\.2 s \(do most of the servers run"):
        await open_bucket(lambda: cast("JetStreamContext", cluster), "b")


async def test_a_server_without_jetstream_says_what_to_do(tmp_path: Path) -> None:
    """Someone's own server."""
    process = plain_server(tmp_path)
    await until(lambda: any(path.read_text() for path in tmp_path.glob("*.ports")))
    url = next(tmp_path.glob("*.ports")).read_text().split('"')[3]
    bus = await connect(url, "t")
    with pytest.raises(WorldError, match="JetStream"):
        await bus.kv("b")
    await bus.close()
    process.terminate()
    process.wait()
