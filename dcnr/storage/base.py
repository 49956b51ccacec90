"""Where checkpoints go: named blobs behind one small protocol, found by URL.

Rule 1: a blob is written whole or not at all, and then it is there: `put` returns when it would survive a power cut.
Rule 2: what cannot be had is told with its place, and sorted by what helps: `NotFound` for a blob that is not there, `WorldError` for what
may pass by itself (no room, no answer), any other `UserError` for what somebody must mend (no right, no such bucket, a wrong URL).
Rule 3: nothing is held between two calls, so there is nothing to close.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Protocol

from dcnr.errors import UserError
from dcnr.storage.file import Buffer, FileStorage
from dcnr.storage.s3 import S3Storage


class Storage(Protocol):
    """One place for blobs, whose keys follow `keys`. Methods may be called at the same time."""

    @property
    def url(self) -> str:
        """What `open_storage` takes to come back here; no secret is in it."""
        ...

    async def put(self, key: str, *data: Buffer) -> None:
        """Write the buffers one after the other as blob `key`, in place of one that is there. They must not change meanwhile."""
        ...

    async def get(self, key: str) -> bytes | memoryview:
        """The blob, read-only; raises `NotFound`."""
        ...

    async def list(self, prefix: str) -> list[str]:
        """Keys that start with `prefix`, sorted."""
        ...

    async def sizes(self, prefix: str) -> dict[str, int]:
        """The same keys in the same order, each with the bytes of its blob."""
        ...

    async def delete(self, prefix: str) -> None:
        """Remove every blob whose key starts with `prefix`; none is no error."""
        ...

    async def sweep(self, prefix: str) -> None:
        """Remove what writers that were killed a day ago or earlier left of half-written blobs, which nobody else can see."""
        ...

    async def exists(self, key: str) -> bool:
        """Whether there is a blob `key`."""
        ...


SCHEMES: Mapping[str, Callable[[str], Storage]] = {"file": FileStorage.from_url, "s3": S3Storage.from_url}


@cache
def open_storage(url: str) -> Storage:
    """The storage at `url`, one object for each; nothing is made or contacted yet."""
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        known = " and ".join(f"{name}://" for name in SCHEMES)
        raise UserError(f"'{scheme}' is no kind of storage: there are {known}", "use file:///absolute/path or s3://bucket/prefix")
    return SCHEMES[scheme](url)
