"""Storage in a bucket, on a real server."""

from __future__ import annotations

import asyncio
import re
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Any

import aioboto3
import numpy as np
import pytest

from dcnr.errors import NotFound, UserError, WorldError
from dcnr.storage import s3
from dcnr.storage.base import Storage, open_storage
from dcnr.storage.place import read_place
from dcnr.storage.s3 import S3Storage
from tests.bus.clusters import free_ports
from tests.storage.contract import StorageContract
from tests.storage.server import CREDENTIALS, SMALLEST_PART, S3Server

BIG = bytes(np.random.Generator(np.random.Philox(7)).integers(0, 256, 1_000_003, np.uint8))


class TestS3Storage(StorageContract):
    """Under a prefix of a bucket."""

    @pytest.fixture
    def storage(self, bucket_url: str) -> Storage:
        """Fresh."""
        return S3Storage.from_url(bucket_url)


@pytest.fixture
def storage(bucket_url: str) -> S3Storage:
    """Fresh."""
    return S3Storage.from_url(bucket_url)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte is many parts."""
    monkeypatch.setattr(s3, "PART", SMALLEST_PART)


@cache
def plain_session() -> Any:
    """What it reads from disk takes a while."""
    return aioboto3.Session()


@asynccontextmanager
async def plain_client(storage: S3Storage) -> AsyncIterator[tuple[Any, str]]:
    """Another client, and the bucket."""
    place = read_place(storage.url)
    async with plain_session().client("s3", endpoint_url=place.endpoint, region_name=place.region, verify=False) as client:
        yield client, place.bucket


async def unfinished(storage: S3Storage) -> list[str]:
    """Keys of multipart uploads that are under way."""
    async with plain_client(storage) as (client, bucket):
        return [upload["Key"] for upload in (await client.list_multipart_uploads(Bucket=bucket)).get("Uploads", ())]


# -- blobs ----------------------------------------------------------------------------------------------------------------


async def test_a_large_blob_goes_in_parts_and_comes_back_in_parts(storage: S3Storage) -> None:
    """Of the size that is used, from buffers that do not end where parts do."""
    blob = np.random.Generator(np.random.Philox(1)).integers(0, 256, 2 * s3.PART + 12_345, np.uint8)
    await storage.put("large", b"head", blob[:1000].data, blob[1000 : s3.PART + 5].data, b"", blob[s3.PART + 5 :].data)
    assert await storage.get("large") == b"head" + blob.tobytes()
    async with plain_client(storage) as (client, bucket):
        etag = (await client.head_object(Bucket=bucket, Key="some/prefix/large"))["ETag"]
    assert etag.endswith('-3"')
    assert await unfinished(storage) == []


@pytest.mark.parametrize("size", [SMALLEST_PART - 1, SMALLEST_PART, SMALLEST_PART + 1, 3 * SMALLEST_PART, 3 * SMALLEST_PART + 1])
async def test_sizes_around_a_part(storage: S3Storage, small_parts: None, size: int) -> None:
    """Not a byte more or less."""
    await storage.put("k", BIG[:100], BIG[100:size])
    assert await storage.get("k") == BIG[:size]
    assert await storage.sizes("") == {"k": size}


async def test_a_large_blob_is_never_held_a_second_time(storage: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the parts that are under way."""
    monkeypatch.setattr(s3, "PART", 512 << 10)
    blob = bytes(24 << 20)
    await storage.exists("k")  # what is read once
    tracemalloc.start()
    await storage.put("k", blob)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 << 20


async def test_other_objects_of_the_bucket_are_left_alone(storage: S3Storage) -> None:
    """Those outside the prefix, and those that are no blobs."""
    foreign = ["elsewhere", "some/prefix-2/k", "some/prefix/", "some/prefix/folder/", "some/prefix/.hidden"]
    await storage.put("k", b"x")
    async with plain_client(storage) as (client, bucket):
        for key in foreign:
            await client.put_object(Bucket=bucket, Key=key, Body=b"")
        assert await storage.list("") == ["k"]
        await storage.delete("")
        assert await storage.list("") == []
        left = [item["Key"] for item in (await client.list_objects_v2(Bucket=bucket))["Contents"]]
    assert left == sorted(foreign)


async def test_more_blobs_than_one_page_or_one_request_takes(storage: S3Storage, s3_server: S3Server) -> None:
    """All are listed, and all are removed."""
    keys = [f"many/{index:04d}" for index in range(1001)]
    place = read_place(storage.url)
    await asyncio.to_thread(s3_server.put_many, place.bucket, [place.prefix + key for key in keys])
    assert await storage.list("many/") == keys
    await storage.delete("many/")
    assert await storage.list("") == []


# -- uploads that fail ----------------------------------------------------------------------------------------------------


async def test_an_upload_that_fails_leaves_the_old_blob_and_no_parts(storage: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the server refuses the parts when they are to be joined: they are too small."""
    await storage.put("k", b"old")
    monkeypatch.setattr(s3, "PART", SMALLEST_PART // 2)
    with pytest.raises(UserError, match="cannot write 'k': EntityTooSmall"):
        await storage.put("k", BIG)
    assert bytes(await storage.get("k")) == b"old"
    assert await unfinished(storage) == []


async def test_an_upload_that_is_cancelled_leaves_no_parts(storage: S3Storage, small_parts: None) -> None:
    """And no blob."""
    upload = asyncio.create_task(storage.put("k", BIG * 20))
    async with asyncio.timeout(20):
        while not await unfinished(storage):
            assert not upload.done()
    upload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upload
    assert await unfinished(storage) == []
    assert not await storage.exists("k")


async def test_a_sweep_removes_what_killed_uploads_left(storage: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once nobody can be writing it any more, and under the prefix only."""
    async with plain_client(storage) as (client, bucket):
        for key in ("some/prefix/a/k", "some/prefix/b", "elsewhere"):
            await client.create_multipart_upload(Bucket=bucket, Key=key)
    with monkeypatch.context() as patient:
        patient.setattr(s3, "HALF_WRITTEN", 1e9)  # the server says that all began in 2010
        await storage.sweep("")
    assert len(await unfinished(storage)) == 3
    await storage.sweep("a/")
    assert sorted(await unfinished(storage)) == ["elsewhere", "some/prefix/b"]
    await storage.sweep("")
    assert await unfinished(storage) == ["elsewhere"]


async def test_a_server_that_is_killed_in_the_middle_of_an_upload(credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may pass: nothing is there afterwards, and once a server is back the same object writes again."""
    monkeypatch.setattr(s3, "PART", SMALLEST_PART)
    monkeypatch.setattr(s3, "ATTEMPTS", 2)
    server = S3Server()
    again = None
    try:
        server.make_bucket("bucket")
        storage = S3Storage.from_url(server.url("bucket"))
        upload = asyncio.create_task(storage.put("k", BIG * 20))
        async with asyncio.timeout(20):
            while not await unfinished(storage):
                assert not upload.done()
        server.stop()
        with pytest.raises(WorldError, match=re.escape(f"s3://bucket/ at {server.endpoint}: cannot write 'k': ")):
            await upload
        again = S3Server(server.port)
        again.make_bucket("bucket")
        assert await storage.list("") == []
        await storage.put("k", BIG)
        assert await storage.get("k") == BIG
    finally:
        server.stop()
        if again is not None:
            again.stop()


# -- what a person is told ------------------------------------------------------------------------------------------------

Use = Callable[[S3Storage], Coroutine[Any, Any, object]]
USES: dict[str, Use] = {
    "put": lambda storage: storage.put("k", b"x"),
    "get": lambda storage: storage.get("k"),
    "list": lambda storage: storage.list(""),
    "delete": lambda storage: storage.delete(""),
    "exists": lambda storage: storage.exists("k"),
    "sweep": lambda storage: storage.sweep(""),
}


@pytest.mark.parametrize("use", USES)
async def test_a_bucket_that_is_not_there(s3_server: S3Server, credentials: None, use: str) -> None:
    """Somebody must make it; and no checkpoint is taken for damaged."""
    storage = S3Storage.from_url(s3_server.url("nobodys-bucket", "x"))
    with pytest.raises(UserError, match=f"s3://nobodys-bucket/x/ at {s3_server.endpoint}: .*NoSuchBucket.*make the bucket") as error:
        await USES[use](storage)
    assert not isinstance(error.value, NotFound)


@pytest.mark.parametrize("use", USES)
async def test_credentials_that_the_server_does_not_know(s3_server: S3Server, bucket_url: str, use: str) -> None:
    """Told with what to do, and without them."""
    s3_server.check_credentials(True)
    try:
        with pytest.raises(UserError, match=r"s3://bucket-.* at http.*InvalidAccessKeyId.*check the credentials") as error:
            await USES[use](S3Storage.from_url(bucket_url))
    finally:
        s3_server.check_credentials(False)
    assert not isinstance(error.value, NotFound)
    for secret in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert CREDENTIALS[secret] not in str(error.value)


async def test_no_credentials_at_all(bucket_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which variables to set."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(UserError, match=r"Unable to locate credentials.*set AWS_ACCESS_KEY_ID"):
        await S3Storage.from_url(bucket_url).list("")


async def test_a_profile_that_is_not_there(bucket_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name."""
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(UserError, match=r"nobody.*AWS_PROFILE"):
        await S3Storage.from_url(bucket_url).list("")


def test_without_the_package_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything begins."""
    monkeypatch.setattr(s3, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"aioboto3 is not installed.*pip install 'dcnr\[s3\]'"):
        S3Storage.from_url("s3://bucket")


def test_the_same_url_is_the_same_storage() -> None:
    """What botocore reads from disk is read once."""
    assert open_storage("s3://bucket/x") is open_storage("s3://bucket/x")


# -- servers that misbehave -----------------------------------------------------------------------------------------------

Answer = Callable[[str], bytes | None]
"""From the first line of a request to an answer, after which the connection is closed; None for none at all."""


@asynccontextmanager
async def listening(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[S3Storage]:
    """A storage whose server is `serve`; in the end every connection is closed."""
    connections: list[asyncio.Task[Any] | None] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        with suppress(ConnectionError, asyncio.IncompleteReadError):  # the client went first
            await serve(reader, writer)
        writer.transport.abort()

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        try:
            yield S3Storage.from_url(f"s3://bucket?endpoint_url=http://127.0.0.1:{port}&path_style=1&region=us-east-1")
        finally:
            await asyncio.gather(*filter(None, connections))


@asynccontextmanager
async def served(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[S3Storage]:
    """A storage whose server is `answer`."""
    monkeypatch.setattr(s3, "READ_TIMEOUT", 0.2)
    monkeypatch.setattr(s3, "ATTEMPTS", 3)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if "expect: 100-continue" in head.lower():
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
        await reader.readexactly(int(length[1]) if length else 0)
        if (said := answer(head.splitlines()[0])) is None:
            await reader.read()  # until the client gives up
        else:
            writer.write(said)
            await writer.drain()

    async with listening(serve) as storage:
        yield storage


def reply(status: str, body: bytes = b"", length: int | None = None) -> bytes:
    """An answer whose body may be shorter than it says."""
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body) if length is None else length}\r\nconnection: close\r\n\r\n".encode() + body


async def test_a_server_that_is_busy_is_asked_again(credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third time it has time."""
    asked: list[str] = []

    def answer(line: str) -> bytes:
        asked.append(line)
        return reply("503 Slow Down") if len(asked) < 3 else reply("200 OK")

    async with served(answer, monkeypatch) as storage:
        await storage.put("k", b"hello")
    assert asked == ["PUT /bucket/k HTTP/1.1"] * 3


async def test_a_server_that_stays_busy_may_pass(credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After as many attempts as promised."""
    asked: list[str] = []

    def answer(line: str) -> bytes:
        asked.append(line)
        return reply("500 Internal Server Error")

    async with served(answer, monkeypatch) as storage:
        with pytest.raises(WorldError, match=r"cannot write 'k': 500.*3 attempts"):
            await storage.put("k", b"hello")
    assert len(asked) == 3


async def test_a_server_that_never_answers_is_given_up(credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bounded time."""
    async with served(lambda line: None, monkeypatch) as storage:
        with pytest.raises(WorldError, match=r"Read timeout.*is the endpoint running"):
            await storage.list("")


async def test_a_server_that_stops_reading_is_given_up(credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the middle of a body."""
    monkeypatch.setattr(s3, "SEND_TIMEOUT", 0.5)
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gone.wait()

    async with listening(serve) as storage:
        try:
            with pytest.raises(WorldError, match="no answer in time"):
                await storage.put("k", bytes(s3.PART))
        finally:
            gone.set()


async def test_an_endpoint_that_is_down_may_pass(credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told with where it should be, soon."""
    (unused_port,) = free_ports(1)
    monkeypatch.setattr(s3, "ATTEMPTS", 2)
    storage = S3Storage.from_url(f"s3://bucket?endpoint_url=http://127.0.0.1:{unused_port}&path_style=1&region=us-east-1")
    began = time.monotonic()
    with pytest.raises(WorldError, match=rf"s3://bucket/ at http://127.0.0.1:{unused_port}: cannot list blobs: .*is the endpoint running"):
        await storage.list("")
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(("broken", "outcome"), [(2, "got"), (3, "WorldError")])
async def test_an_answer_that_breaks_off_is_asked_for_again(
    credentials: None, monkeypatch: pytest.MonkeyPatch, broken: int, outcome: str
) -> None:
    """Three times; botocore itself does not."""
    got = 0

    def answer(line: str) -> bytes:
        nonlocal got
        if "list-type=2" in line:
            item = "<Contents><Key>k</Key><Size>5</Size><ETag>&quot;e&quot;</ETag></Contents>"
            return reply("200 OK", f"<ListBucketResult><IsTruncated>false</IsTruncated>{item}</ListBucketResult>".encode())
        got += 1
        return reply("206 Partial Content", b"hel", 5) if got <= broken else reply("206 Partial Content", b"hello")

    async with served(answer, monkeypatch) as storage:
        if outcome == "got":
            assert bytes(await storage.get("k")) == b"hello"
        else:
            with pytest.raises(WorldError, match="cannot read 'k'"):
                await storage.get("k")
    assert got == 3
