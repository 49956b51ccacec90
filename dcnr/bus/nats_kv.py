"""A JetStream bucket as `base.Kv`.

- A bucket is made right the first time: file storage, one revision kept. Changing it later is known to break it.
- Delete and expiry markers are absent keys.
- A write that timed out may still have been applied: the error says so, and the caller reads again.
- `entries` asks the stream for its subjects, since the end of a key watch can be reported too early.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import nats.errors
import nats.js.errors
from nats.js.api import KeyValueConfig, StorageType
from nats.js.client import JetStreamContext
from nats.js.kv import KeyValue

from dcnr.bus.base import Entry, KeyConflict
from dcnr.errors import UserError, WorldError

_NAME_IN_USE = 10058
"""JetStream's code for a stream that exists with other settings."""
_MARKERS = frozenset(("KV-Operation", "Nats-Marker-Reason"))
"""Headers of what stands in the place of a deleted or expired key."""
_JETSTREAM_OFF = (nats.errors.NoRespondersError, nats.js.errors.ServiceUnavailableError, nats.js.errors.NoStreamResponseError)


async def open_bucket(jetstream: Callable[[], JetStreamContext], bucket: str) -> NatsKv:
    """The bucket, made if it is not there. Raises `UserError` if the server has no JetStream."""
    kv = NatsKv(jetstream, bucket)
    await kv.make()
    return kv


class NatsKv:
    """One bucket. It asks for its JetStream context each time, since the client under it may be rebuilt."""

    def __init__(self, jetstream: Callable[[], JetStreamContext], bucket: str) -> None:
        self._jetstream = jetstream
        self._bucket = bucket
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."

    async def make(self) -> None:
        """Create the bucket; one that exists with the same settings stays as it is."""
        with _translated(f"bucket {self._bucket}"):
            try:
                await self._jetstream().create_key_value(KeyValueConfig(self._bucket, history=1, storage=StorageType.FILE))
            except nats.js.errors.BadRequestError as error:
                if error.err_code != _NAME_IN_USE:
                    raise

    async def get(self, key: str) -> Entry | None:
        """The newest value."""
        with _translated(f"get {self._bucket}/{key}"):
            return await self._get(key)

    async def put(self, key: str, value: bytes) -> int:
        """Write whatever is there."""
        with _translated(f"put {self._bucket}/{key}"):
            return await self._open().put(key, value)

    async def create(self, key: str, value: bytes) -> int:
        """Write where nothing is."""
        with _translated(f"create {self._bucket}/{key}"):
            return await self._open().create(key, value)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Write over exactly `revision`."""
        with _translated(f"update {self._bucket}/{key}"):
            return await self._open().update(key, value, last=revision)

    async def delete(self, key: str) -> None:
        """Remove; absent keys are fine."""
        with _translated(f"delete {self._bucket}/{key}"):
            await self._open().delete(key)

    async def entries(self) -> list[Entry]:
        """All, in key order."""
        with _translated(f"entries of {self._bucket}"):
            info = await self._jetstream().stream_info(self._stream, subjects_filter=f"{self._prefix}>")
            keys = sorted(subject.removeprefix(self._prefix) for subject in info.state.subjects or ())
            found = await asyncio.gather(*(self._get(key) for key in keys))
        return [entry for entry in found if entry is not None]

    async def _get(self, key: str) -> Entry | None:
        """Not nats-py's `get`, which shows an empty value and a marker of an expired key alike."""
        try:
            msg = await self._jetstream().get_msg(self._stream, subject=self._prefix + key)
        except nats.js.errors.NotFoundError:
            return None
        if msg.seq is None or not _MARKERS.isdisjoint(msg.headers or ()):
            return None
        return Entry(key, msg.data or b"", msg.seq)

    def _open(self) -> KeyValue:
        return KeyValue(self._bucket, self._stream, self._prefix, self._jetstream(), direct=False)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except nats.js.errors.KeyWrongLastSequenceError as error:
        raise KeyConflict(what) from error
    except nats.js.errors.InvalidKeyError as error:
        raise UserError(f"{what}: not a valid key", "use letters, digits, '_', '-', '.', '='") from error
    except nats.errors.TimeoutError as error:
        raise WorldError(f"{what}: no answer in time; a write may still have been applied") from error
    except _JETSTREAM_OFF as error:
        raise WorldError(f"{what}: JetStream does not answer", "enable it in the server, or use the bundled one: dcnr up") from error
    except nats.errors.Error as error:
        raise WorldError(f"{what} failed: {error}", "see: dcnr doctor") from error
