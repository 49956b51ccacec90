"""Storage in a bucket: `s3://bucket/prefix?endpoint_url=http://host:9000&region=eu-west-1&path_style=1`, on AWS or whatever speaks S3.

Rule 1: a blob above `PART` goes up as a multipart upload, which S3 shows when its last part is there, or never; it is aborted if a part
fails. At most `PARALLEL` parts are copied and under way at once. Each carries its MD5, so that the server refuses what was damaged.
Rule 2: every request is tried `ATTEMPTS` times, with botocore's back-off and jitter, and no wait is without a limit.
Rule 3: credentials come from the usual chain (environment, `~/.aws`, the machine's role) and stay there: a URL that holds some is refused,
and no message shows more of a URL than where it leads.
Rule 4: calls share nothing but what botocore read from disk, so an object needs no closing, and no connection outlives its call.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, TypeVar

from dcnr.errors import DcnrError, NotFound, UserError, WorldError
from dcnr.storage.file import Buffer
from dcnr.storage.keys import HALF_WRITTEN, check_key, check_prefix, is_key
from dcnr.storage.place import Place, read_place

T = TypeVar("T")

PART = 8 << 20
"""Bytes of one part of a large blob, up or down."""
MAX_PARTS = 10_000
"""S3's limit: the parts of a blob above 80 GB are larger."""
PARALLEL = 4
DELETED_AT_ONCE = 1000
"""S3's limit."""

ATTEMPTS = 4
CONNECT_TIMEOUT = 5.0
READ_TIMEOUT = 30.0
SEND_TIMEOUT = 300.0
"""Seconds for one request that has a body, its repetitions included: it asks for 28 KB/s."""

MAY_PASS = frozenset(
    {
        "RequestTimeout", "SlowDown", "Throttling", "NoSuchUpload", "OperationAborted", "PreconditionFailed", "BadDigest",
        "InternalError", "ServiceUnavailable",
    }
)  # fmt: skip
DENIED = frozenset({"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "AllAccessDisabled"})


class S3Storage:
    """Blobs as objects under one prefix of a bucket. The methods are those of `Storage`."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._session: Any = None

    @classmethod
    def from_url(cls, url: str) -> S3Storage:
        """Of `s3://bucket/prefix?endpoint_url=…&region=…&path_style=1`, everything but the bucket optional."""
        place = read_place(url)
        if find_spec("aioboto3") is None:
            raise UserError(f"{place} cannot be reached: the package aioboto3 is not installed here", "pip install 'dcnr[s3]'")
        return cls(place)

    @property
    def url(self) -> str:
        """`s3://bucket/prefix` and its options."""
        return self._place.url

    async def put(self, key: str, *data: Buffer) -> None:
        """Write a blob."""
        target = self._target(key)
        size = sum(memoryview(buffer).nbytes for buffer in data)
        pieces = _pieces(data, max(PART, -(-size // MAX_PARTS)))
        async with self._client(f"write '{key}'") as client:
            if size <= PART:
                body, md5 = await asyncio.to_thread(_joined, next(pieces, []))
                await _limited(client.put_object(**target, Body=body, ContentMD5=md5))
            else:
                await _put_parts(client, target, pieces)

    async def get(self, key: str) -> memoryview:
        """Read a blob, several parts at once."""
        target = self._target(key)
        async with self._client(f"read '{key}'") as client:
            found = await self._find(client, target["Key"])
            if found is None:
                raise NotFound(f"there is no '{key}' in {self._place}")
            data = memoryview(bytearray(found["Size"]))
            offsets = range(0, len(data), PART)
            await _several(partial(_get_part, client, target | {"IfMatch": found["ETag"]}, data), offsets)
            return data.toreadonly()

    async def list(self, prefix: str) -> list[str]:
        """Find blobs."""
        return list(await self.sizes(prefix))

    async def sizes(self, prefix: str) -> dict[str, int]:
        """Find blobs and measure them."""
        start = self._place.prefix + check_prefix(prefix)
        async with self._client("list blobs") as client:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=self._place.bucket, Prefix=start)
            found = {self._key(item["Key"]): item["Size"] async for page in pages for item in page.get("Contents", ())}
        return {key: found[key] for key in sorted(found) if is_key(key)}

    async def delete(self, prefix: str) -> None:
        """Remove blobs."""
        keys = await self.list(prefix)
        async with self._client("remove blobs") as client:
            for first in range(0, len(keys), DELETED_AT_ONCE):
                await self._delete(client, keys[first : first + DELETED_AT_ONCE])

    async def sweep(self, prefix: str) -> None:
        """Abort multipart uploads that are too old to become blobs."""
        start = self._place.prefix + check_prefix(prefix)
        before = datetime.now(UTC) - timedelta(seconds=HALF_WRITTEN)
        async with self._client("remove half-written blobs") as client:
            pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=self._place.bucket, Prefix=start)
            async for page in pages:
                for upload in page.get("Uploads", ()):
                    if is_key(self._key(upload["Key"])) and upload["Initiated"] < before:
                        target = {"Bucket": self._place.bucket, "Key": upload["Key"]}
                        await client.abort_multipart_upload(**target, UploadId=upload["UploadId"])

    async def exists(self, key: str) -> bool:
        """Look for a blob."""
        target = self._target(key)
        async with self._client(f"look for '{key}'") as client:
            return await self._find(client, target["Key"]) is not None

    def _target(self, key: str) -> dict[str, str]:
        return {"Bucket": self._place.bucket, "Key": self._place.prefix + check_key(key)}

    def _key(self, stored: str) -> str:
        return stored.removeprefix(self._place.prefix)

    async def _find(self, client: Any, stored: str) -> dict[str, Any] | None:
        """By listing, which tells a blob that is not there from a bucket that is not, as asking for the blob's head does not."""
        page = await client.list_objects_v2(Bucket=self._place.bucket, Prefix=stored, MaxKeys=1)
        return next((item for item in page.get("Contents", ()) if item["Key"] == stored), None)

    async def _delete(self, client: Any, keys: Sequence[str]) -> None:
        from botocore.exceptions import ClientError

        objects = [{"Key": self._place.prefix + key} for key in keys]
        answer = await client.delete_objects(Bucket=self._place.bucket, Delete={"Objects": objects, "Quiet": True})
        for failed in answer.get("Errors", ()):
            raise ClientError({"Error": failed, **answer}, "DeleteObjects")

    @asynccontextmanager
    async def _client(self, what: str) -> AsyncIterator[Any]:
        try:
            if self._session is None:
                self._session = await asyncio.to_thread(_new_session, self._place)
            async with _open(self._session, self._place) as client:
                yield client
        except _foreign() as error:
            raise _told(f"{self._place}: cannot {what}", error) from error


# -- botocore, which takes a second to import -----------------------------------------------------------------------------


@cache
def _loader() -> Any:
    """What botocore knows of all services: megabytes of JSON, read once for all sessions."""
    from botocore.loaders import create_loader

    return create_loader()


def _new_session(place: Place) -> Any:
    """Runs on a thread: the first one of a process takes a second."""
    import aioboto3
    from aiobotocore.session import AioSession

    async def warm_up() -> None:
        async with _open(session, place):
            pass

    inner = AioSession()
    inner.register_component("data_loader", _loader())
    session = aioboto3.Session(botocore_session=inner)
    asyncio.run(warm_up())
    return session


def _open(session: Any, place: Place) -> AbstractAsyncContextManager[Any]:
    from aiobotocore.config import AioConfig

    config = AioConfig(
        connect_timeout=CONNECT_TIMEOUT,
        read_timeout=READ_TIMEOUT,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        max_pool_connections=PARALLEL,
        # what we send has its MD5 and what we read a SHA-256 of ours; newer checksums are unknown to many servers
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path" if place.path_style else "auto", "payload_signing_enabled": False},
    )
    # reading all certificates of the machine takes longer than a small request; they are of no use without TLS
    verify = False if place.endpoint and place.endpoint.startswith("http://") else None
    where = {"endpoint_url": place.endpoint, "region_name": place.region, "verify": verify}
    client: AbstractAsyncContextManager[Any] = session.client("s3", config=config, **where)
    return client


def _foreign() -> tuple[type[Exception], ...]:
    """What botocore and what is below it raise."""
    import aiohttp
    from botocore.exceptions import BotoCoreError, ClientError

    return BotoCoreError, ClientError, aiohttp.ClientError, TimeoutError


def _told(what: str, error: Exception) -> DcnrError:
    """`error` as one of ours: by whether it may pass, and what a person can do."""
    from botocore import exceptions as boto

    if isinstance(error, boto.ClientError):
        return _refused(what, error.response)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.CredentialRetrievalError | boto.ProfileNotFound):
        return UserError(f"{what}: {error}", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, on every machine")
    if isinstance(error, boto.SSLError):
        return UserError(f"{what}: {error}", "does the endpoint speak https, and is its certificate known here (AWS_CA_BUNDLE)?")
    if isinstance(error, boto.BotoCoreError) and not isinstance(
        error, boto.HTTPClientError | boto.ConnectionError | boto.IncompleteReadError
    ):
        return UserError(f"{what}: {error}", "check the storage URL, and ~/.aws/config")
    reason = str(error) or "no answer in time"
    return WorldError(f"{what}: {reason} ({ATTEMPTS} attempts)", "is the endpoint running, and reachable from this machine?")


def _refused(what: str, response: dict[str, Any]) -> DcnrError:
    code, text = response["Error"].get("Code", "?"), response["Error"].get("Message", "")
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)
    what = f"{what}: {code}, {text}"
    if code == "NoSuchBucket":
        return UserError(what, "make the bucket, or name another one in the storage URL")
    if code == "NoSuchKey":
        return NotFound(what)
    if code in MAY_PASS or status in {408, 409, 412, 429} or status >= 500:
        return WorldError(f"{what} ({ATTEMPTS} attempts)", "try again; if it stays, look at the server's log")
    if code in DENIED or status in {401, 403}:
        return UserError(what, "check the credentials (AWS_ACCESS_KEY_ID, AWS_PROFILE, …) and what they may do in this bucket")
    return UserError(what, "check the endpoint and the region in the storage URL")


# -- parts ----------------------------------------------------------------------------------------------------------------


async def _put_parts(client: Any, target: dict[str, str], pieces: Iterator[list[memoryview]]) -> None:
    upload = target | {"UploadId": (await client.create_multipart_upload(**target))["UploadId"]}
    tags: dict[int, str] = {}

    async def put_part(numbered: tuple[int, list[memoryview]]) -> None:
        number, piece = numbered
        body, md5 = await asyncio.to_thread(_joined, piece)
        answer = await _limited(client.upload_part(**upload, PartNumber=number, Body=body, ContentMD5=md5))
        tags[number] = answer["ETag"]

    complete = False
    try:
        await _several(put_part, enumerate(pieces, 1))
        parts = [{"PartNumber": number, "ETag": tags[number]} for number in sorted(tags)]
        await client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
        complete = True
    finally:
        if not complete:
            with suppress(*_foreign()):  # what made it fail is told; `sweep` removes what could not be aborted
                await client.abort_multipart_upload(**upload)


async def _get_part(client: Any, target: dict[str, str], data: memoryview, first: int) -> None:
    """Fill `data` from `first` on. botocore repeats a request, but not one whose answer breaks off: that is done here."""
    into = data[first : first + PART]
    asked = target | {"Range": f"bytes={first}-{first + len(into) - 1}"}
    for left in reversed(range(ATTEMPTS)):
        answer = await client.get_object(**asked)
        try:
            async with answer["Body"] as body:
                part = await body.read()
        except _foreign():
            if not left:
                raise
        else:
            if len(part) != len(into):
                raise UserError(f"{target['Key']}: the server sent {len(part)} bytes for {len(into)}", "does it know byte ranges?")
            into[:] = part
            return


async def _several(work: Callable[[T], Awaitable[None]], items: Iterable[T]) -> None:
    """`work` on all items, `PARALLEL` at once; the first error ends it."""
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(PARALLEL):
                group.create_task(worker())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _limited(request: Awaitable[T]) -> T:
    """A server that stops reading holds up a request with a body for ever: no time-out of the client's own sees it."""
    async with asyncio.timeout(SEND_TIMEOUT):
        return await request


def _pieces(data: Iterable[Buffer], size: int) -> Iterator[list[memoryview]]:
    """The buffers cut into pieces of `size` bytes, not copied; the last one may be smaller."""
    piece: list[memoryview] = []
    room = size
    for buffer in data:
        rest = memoryview(buffer)
        while len(rest) >= room:
            yield [*piece, rest[:room]]
            piece, rest, room = [], rest[room:], size
        if rest:
            piece.append(rest)
            room -= len(rest)
    if piece:
        yield piece


def _joined(piece: Sequence[memoryview]) -> tuple[io.BytesIO, str]:
    """A copy as a request wants it, and its MD5."""
    body = b"".join(piece)
    return io.BytesIO(body), base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
