"""Storage for checkpoints, which survives every process: plain memory, where a write is there whole or not at all.

`asyncio` is only the calling convention of the functions under test: each
coroutine is run to its end at one moment of virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from dcnr.errors import NotFound, WorldError

T = TypeVar("T")
URL = "memory://simulated"


class Disk:
    """A `Storage` in memory."""

    url = URL

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.full = False
        self.refused = 0
        """How often it was full."""

    async def put(self, key: str, *data: Any) -> None:
        """Write a blob, if there is room."""
        if self.full:
            self.refused += 1
            raise WorldError(f"{self.url}/{key}: no space left on device", "make room")
        self.blobs[key] = b"".join(bytes(one) for one in data)

    async def get(self, key: str) -> bytes:
        """Read a blob."""
        if key not in self.blobs:
            raise NotFound(f"{self.url}/{key} does not exist")
        return self.blobs[key]

    async def list(self, prefix: str) -> list[str]:
        """Keys that start with `prefix`."""
        return list(await self.sizes(prefix))

    async def sizes(self, prefix: str) -> dict[str, int]:
        """The same with the bytes of each."""
        return {key: len(blob) for key, blob in sorted(self.blobs.items()) if key.startswith(prefix)}

    async def sweep(self, prefix: str) -> None:
        """There is nothing half-written."""

    async def delete(self, prefix: str) -> None:
        """Remove what starts with `prefix`."""
        for key in await self.list(prefix):
            del self.blobs[key]

    async def exists(self, key: str) -> bool:
        """Whether there is a blob `key`."""
        return key in self.blobs


class _AtOnce(asyncio.SelectorEventLoop):
    """A loop whose threads are done before they begin, and on which no time passes."""

    def time(self) -> float:
        """So no time-out is due, however busy this machine is."""
        return 0.0

    def run_in_executor(self, _executor: object, call: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Call it here and now."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(call(*args))
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future


class Now:
    """Runs coroutines to their end, at once."""

    def __init__(self) -> None:
        self._loop = _AtOnce()

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        """Let go of the loop."""
        self._loop.close()
