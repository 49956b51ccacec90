"""What the protocol needs of a message bus and of a key-value store. `memory` and `nats` pass the same contract tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from dcnr.errors import WorldError

OnMessage = Callable[[bytes], None]
"""Called on the loop with the payload. It only enqueues: it never blocks, awaits or raises."""

Handler = Callable[[bytes], Awaitable[bytes]]


class Subscription(Protocol):
    """An interest in a subject."""

    async def stop(self) -> None:
        """No callback after this returns."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of a bucket. `revision` only grows."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Way:
    """How the server is reached: from which address of ours, and whether nobody in between can read along."""

    address: str
    encrypted: bool


class Kv(Protocol):
    """One bucket. Values are small; deleted and expired keys are simply absent.

    Every method raises `WorldError` if there was no answer in time, and then a write may have been applied all the same.
    """

    @property
    def replicas(self) -> int:
        """On how many servers it is kept."""
        ...

    async def get(self, key: str) -> Entry | None:
        """The newest value."""
        ...

    async def put(self, key: str, value: bytes) -> int:
        """Write whatever is there; returns the revision."""
        ...

    async def create(self, key: str, value: bytes) -> int:
        """Write where nothing is; raises `KeyConflict` otherwise."""
        ...

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Write over exactly `revision`; raises `KeyConflict` otherwise."""
        ...

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Remove, if given exactly `revision`; raises `KeyConflict` otherwise. Absent keys are fine."""
        ...

    async def entries(self) -> list[Entry]:
        """All, in key order."""
        ...


class KeyConflict(Exception):
    """Somebody else wrote the key first."""


class BucketGone(WorldError):
    """There is no such bucket, or no longer."""


class Bus(Protocol):
    """At most once, in order per publisher and subject while connected; nothing is kept for absent subscribers."""

    @property
    def max_payload(self) -> int:
        """Bytes of the largest message."""
        ...

    @property
    def way(self) -> Way | None:
        """How the server is reached; None where there is no network between."""
        ...

    async def publish(self, subject: str, data: bytes) -> None:
        """Send; returns when the client took it, not when anyone got it."""
        ...

    async def subscribe(self, subject: str, on_message: OnMessage) -> Subscription:
        """Wildcards as in NATS (`*`, `>`). Active at the server when this returns."""
        ...

    async def request(self, subject: str, data: bytes, timeout: float) -> bytes:
        """Ask one responder. Raises `BusUnavailable` if nobody serves the subject, `WorldError` after `timeout` seconds."""
        ...

    async def serve(self, subject: str, handler: Handler) -> Subscription:
        """Answer requests; requests run concurrently. A handler never raises: an error is an answer."""
        ...

    async def kv(self, bucket: str, make: bool = True) -> Kv:
        """The bucket, made if it is not there, or else `BucketGone` is raised."""
        ...

    async def close(self) -> None:
        """Deliver what was published, then disconnect."""
        ...
