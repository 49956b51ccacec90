"""A JetStream bucket as `base.Kv`.

- A bucket is made right the first time: file storage, one revision kept, on three servers where there are as many. One that exists stays as
  it is: changing it later is known to break it.
- How many servers there are is what the server answers when three copies are asked for. One that has just started may not answer at all
  for a while, or not know its neighbours yet: it is asked again for `READY_WITHIN` and `NEIGHBOURS_WITHIN` seconds.
- Delete and expiry markers are absent keys.
- A write that timed out may still have been applied: the error says so, and the caller reads again.
- `entries` asks the stream for its subjects, since the end of a key watch can be reported too early.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import nats.errors
import nats.js.errors
from nats.js.api import KeyValueConfig, StorageType
from nats.js.client import JetStreamContext
from nats.js.kv import KeyValue

from dcnr.bus.base import BucketGone, Entry, KeyConflict
from dcnr.bus.cancellation import heeded
from dcnr.errors import UserError, WorldError

REPLICAS = 3
READY_WITHIN = 15.0
NEIGHBOURS_WITHIN = 3.0
_ASK_AGAIN = 0.1
_NAME_IN_USE = 10058
"""JetStream's code for a stream that exists with other settings."""
_ALONE = 10074
"""For more than one copy, asked of a server without a cluster."""
_FEW_SERVERS = 10005
_NO_LEADER = 10008
_NO_STREAM = 10059
_WRONG_REVISION = frozenset((10071, 10164))
_MARKERS = frozenset(("KV-Operation", "Nats-Marker-Reason"))
"""Headers of what stands in the place of a deleted or expired key."""
_JETSTREAM_OFF = (nats.errors.NoRespondersError, nats.js.errors.NoStreamResponseError)
_SWITCH_ON = "enable it in the server, or use the bundled one: dcnr up"


async def open_bucket(jetstream: Callable[[], JetStreamContext], bucket: str, make: bool = True) -> NatsKv:
    """The bucket, made if it is not there and `make` is set. Raises `BucketGone`, or `WorldError` if the server has no JetStream."""
    kv = NatsKv(jetstream, bucket)
    await kv.open(make)
    return kv


class NatsKv:
    """One bucket. It asks for its JetStream context each time, since the client under it may be rebuilt."""

    def __init__(self, jetstream: Callable[[], JetStreamContext], bucket: str) -> None:
        self._jetstream = jetstream
        self._bucket = bucket
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."
        self._replicas = 1
        self._lonely_since: float | None = None

    @property
    def replicas(self) -> int:
        """On how many servers it is kept."""
        return self._replicas

    async def open(self, make: bool) -> None:
        """Find the bucket, or create it, within `READY_WITHIN` seconds."""
        try:
            async with asyncio.timeout(READY_WITHIN):
                while not await self._opened(make):
                    await asyncio.sleep(_ASK_AGAIN)
        except TimeoutError as error:
            remedy = "do most of the servers run, and do they see each other? see their logs"
            raise WorldError(f"bucket {self._bucket}: JetStream was not ready within {READY_WITHIN:g} s", remedy) from error

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

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Remove; absent keys are fine."""
        try:
            with _translated(f"delete {self._bucket}/{key}"):
                await self._open().delete(key, last=revision)
        except KeyConflict:
            if await self.get(key) is not None:
                raise

    async def entries(self) -> list[Entry]:
        """All, in key order."""
        with _translated(f"entries of {self._bucket}"):
            info = await self._jetstream().stream_info(self._stream, subjects_filter=f"{self._prefix}>")
            keys = sorted(subject.removeprefix(self._prefix) for subject in info.state.subjects or ())
            found = await asyncio.gather(*(self._get(key) for key in keys))
        return [entry for entry in found if entry is not None]

    async def _opened(self, make: bool) -> bool:
        """Whether the bucket is there; False if it may be there when the server is asked again."""
        try:
            with _translated(f"bucket {self._bucket}"):
                info = await self._jetstream().stream_info(self._stream)
        except _NotReady:
            return False
        except BucketGone:
            if not make:
                raise
        else:
            self._replicas = info.config.num_replicas or 1
            return True
        with suppress(_NotReady), _translated(f"bucket {self._bucket}"):
            await self._make()
        return False

    async def _make(self) -> None:
        try:
            await self._create(REPLICAS)
        except nats.js.errors.APIError as error:
            if error.err_code == _ALONE or (error.err_code == _FEW_SERVERS and self._lonely()):
                await self._create(1)
            elif error.err_code not in (_NAME_IN_USE, _FEW_SERVERS):
                raise

    async def _create(self, replicas: int) -> None:
        config = KeyValueConfig(self._bucket, history=1, storage=StorageType.FILE, replicas=replicas)
        await self._jetstream().create_key_value(config)

    def _lonely(self) -> bool:
        """Whether the server has known too few neighbours for so long that there are no more."""
        now = asyncio.get_running_loop().time()
        self._lonely_since = self._lonely_since or now
        return now - self._lonely_since >= NEIGHBOURS_WITHIN

    async def _get(self, key: str) -> Entry | None:
        """Not nats-py's `get`, which shows an empty value and a marker of an expired key alike."""
        try:
            msg = await self._jetstream().get_msg(self._stream, subject=self._prefix + key)
        except nats.js.errors.NotFoundError as error:
            if error.err_code == _NO_STREAM:
                raise
            return None
        if msg.seq is None or not _MARKERS.isdisjoint(msg.headers or ()):
            return None
        return Entry(key, msg.data or b"", msg.seq)

    def _open(self) -> KeyValue:
        return KeyValue(self._bucket, self._stream, self._prefix, self._jetstream(), direct=False)


class _NotReady(WorldError):
    """JetStream is still looking for a leader, or did not answer in time."""


@contextmanager
def _translated(what: str) -> Iterator[None]:
    with heeded():
        try:
            yield
        except nats.js.errors.InvalidKeyError as error:
            raise UserError(f"{what}: not a valid key", "use letters, digits, '_', '-', '.', '='") from error
        except nats.errors.TimeoutError as error:
            raise _NotReady(f"{what}: no answer in time; a write may still have been applied") from error
        except nats.js.errors.APIError as error:
            raise _api_error(what, error) from error
        except _JETSTREAM_OFF as error:
            raise WorldError(f"{what}: JetStream does not answer", _SWITCH_ON) from error
        except nats.errors.Error as error:
            raise WorldError(f"{what} failed: {error}", "see: dcnr doctor") from error


def _api_error(what: str, error: nats.js.errors.APIError) -> Exception:
    """Ours for one that JetStream answered."""
    if isinstance(error, nats.js.errors.KeyWrongLastSequenceError) or error.err_code in _WRONG_REVISION:
        return KeyConflict(what)
    if error.err_code == _NO_STREAM:
        return BucketGone(f"{what}: there is no such bucket")
    if error.err_code == _NO_LEADER:
        return _NotReady(f"{what}: JetStream has no leader at the moment")
    if isinstance(error, nats.js.errors.ServiceUnavailableError):
        return WorldError(f"{what}: JetStream does not answer", _SWITCH_ON)
    return WorldError(f"{what} failed: {error}", "see: dcnr doctor")
