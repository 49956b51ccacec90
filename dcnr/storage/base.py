"""Where checkpoints go: named blobs behind one small protocol, found by URL.

Rule 1: a blob is written whole or not at all, and then it is there: `put` returns when it would survive a power cut.
Rule 2: what the disk or network refuses is a `UserError` that names the place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from dcnr.errors import UserError
from dcnr.storage.file import Buffer, FileStorage


class Storage(Protocol):
    """One place for blobs, whose keys follow `keys`. Methods may be called at the same time."""

    @property
    def url(self) -> str:
        """What `open_storage` takes to come back here."""
        ...

    async def put(self, key: str, *data: Buffer) -> None:
        """Write the buffers one after the other as blob `key`, in place of one that is there."""
        ...

    async def get(self, key: str) -> bytes:
        """The blob; raises `NotFound`."""
        ...

    async def list(self, prefix: str) -> list[str]:
        """Keys that start with `prefix`, sorted."""
        ...

    async def delete(self, prefix: str) -> None:
        """Remove every blob whose key starts with `prefix`; none is no error."""
        ...

    async def exists(self, key: str) -> bool:
        """Whether there is a blob `key`."""
        ...


SCHEMES: Mapping[str, Callable[[str], Storage]] = {"file": FileStorage.from_url}


def open_storage(url: str) -> Storage:
    """The storage at `url`; nothing is made or contacted yet."""
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise UserError(f"'{url}': this version stores in {known} only", "use file:///absolute/path, on a folder that every machine sees")
    return SCHEMES[scheme](url)
