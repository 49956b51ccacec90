"""A bus inside one process, with the semantics of NATS.

Messages are delivered by `call_soon` in the order in which they were published, so a run with it is deterministic.
It passes the contract tests of `nats`; tests stand on it. A `Fate` decides what happens to each message, for tests of what a network does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dcnr.bus.base import BucketGone, Entry, Handler, KeyConflict, Kv, OnMessage, Subscription
from dcnr.errors import BusUnavailable, UserError, WorldError

DEFAULT_MAX_PAYLOAD = 1 << 20

Fate = Callable[[str, str, str, bytes], Iterable[float]]
"""Called with sender, receiver (client names), subject and message: how many seconds later each copy arrives. Without one, it is lost."""

_Deliver = Callable[[bytes, "asyncio.Future[bytes] | None"], None]


def matches(pattern: str, subject: str) -> bool:
    """Whether a subscription to `pattern` hears `subject`: `*` stands for one token, a last `>` for one or more."""
    wanted, tokens = pattern.split("."), subject.split(".")
    for at, token in enumerate(wanted):
        if token == ">":
            return at < len(tokens)
        if at >= len(tokens) or token not in ("*", tokens[at]):
            return False
    return len(wanted) == len(tokens)


@dataclass(eq=False, slots=True)
class _Interest:
    pattern: str
    deliver: _Deliver
    client: str
    stopped: bool = False


@dataclass(slots=True)
class MemoryBroker:
    """The server: who listens, and the buckets."""

    max_payload: int = DEFAULT_MAX_PAYLOAD
    interests: list[_Interest] = field(default_factory=list)
    buckets: dict[str, MemoryKv] = field(default_factory=dict)
    fate: Fate | None = None

    def connect(self, name: str = "") -> MemoryBus:
        """A client of this broker. `name`: for `fate`."""
        return MemoryBus(self, name)

    def publish(self, sender: str, subject: str, data: bytes, reply: asyncio.Future[bytes] | None = None) -> int:
        """Deliver on the next turns of the loop, or as `fate` says; returns how many listen."""
        if len(data) > self.max_payload:
            raise UserError(f"a message of {len(data)} bytes exceeds the server's max_payload of {self.max_payload}", "raise max_payload")
        loop = asyncio.get_running_loop()
        hearing = [interest for interest in self.interests if matches(interest.pattern, subject)]
        for interest in hearing:
            if self.fate is None:
                loop.call_soon(_hand_over, interest, data, reply)
                continue
            for seconds in self.fate(sender, interest.client, subject, data):
                if seconds:
                    loop.call_later(seconds, _hand_over, interest, data, reply)
                else:
                    loop.call_soon(_hand_over, interest, data, reply)
        return len(hearing)


def _hand_over(interest: _Interest, data: bytes, reply: asyncio.Future[bytes] | None) -> None:
    if not interest.stopped:
        interest.deliver(data, reply)


class MemorySubscription:
    """An interest of one client."""

    def __init__(self, broker: MemoryBroker, interest: _Interest) -> None:
        self._broker = broker
        self._interest = interest

    async def stop(self) -> None:
        """No callback after this returns."""
        self._interest.stopped = True
        if self._interest in self._broker.interests:
            self._broker.interests.remove(self._interest)


class MemoryBus:
    """One client of a `MemoryBroker`."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        self._broker = broker
        self._name = name
        self._subscriptions: list[MemorySubscription] = []
        self._answers: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def max_payload(self) -> int:
        """Bytes of the largest message."""
        return self._broker.max_payload

    @property
    def way(self) -> None:
        """All is one process."""

    async def publish(self, subject: str, data: bytes) -> None:
        """Send to everyone who listens now."""
        self._check_open()
        self._broker.publish(self._name, subject, data)

    async def subscribe(self, subject: str, on_message: OnMessage) -> Subscription:
        """Listen from now on."""
        return self._listen(subject, lambda data, _reply: on_message(data))

    async def request(self, subject: str, data: bytes, timeout: float) -> bytes:
        """Ask; the first answer counts."""
        self._check_open()
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if not self._broker.publish(self._name, subject, data, reply):
            raise BusUnavailable(f"nobody serves {subject}")
        try:
            async with asyncio.timeout(timeout):
                return await reply
        except TimeoutError as error:
            raise WorldError(f"no answer on {subject} within {timeout:g} s") from error

    async def serve(self, subject: str, handler: Handler) -> Subscription:
        """Answer requests, each in its own task."""

        async def answer(data: bytes, reply: asyncio.Future[bytes] | None) -> None:
            result = await handler(data)
            if reply is not None and not reply.done():
                reply.set_result(result)

        def start(data: bytes, reply: asyncio.Future[bytes] | None) -> None:
            task = asyncio.get_running_loop().create_task(answer(data, reply))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)

        return self._listen(subject, start)

    async def kv(self, bucket: str, make: bool = True) -> Kv:
        """The bucket, made if it is not there, or else `BucketGone` is raised."""
        self._check_open()
        if not make and bucket not in self._broker.buckets:
            raise BucketGone(f"there is no bucket {bucket}")
        return self._broker.buckets.setdefault(bucket, MemoryKv())

    async def close(self) -> None:
        """Let answers in hand and messages under way arrive, then leave."""
        if self._closed:
            return
        self._closed = True
        await asyncio.sleep(0)
        await asyncio.gather(*self._answers)
        for subscription in self._subscriptions:
            await subscription.stop()

    def _listen(self, subject: str, deliver: _Deliver) -> MemorySubscription:
        self._check_open()
        interest = _Interest(subject, deliver, self._name)
        self._broker.interests.append(interest)
        subscription = MemorySubscription(self._broker, interest)
        self._subscriptions.append(subscription)
        return subscription

    def _check_open(self) -> None:
        if self._closed:
            raise WorldError("the connection is closed")


class MemoryKv:
    """One bucket; revisions count all its writes, as in JetStream."""

    replicas = 1

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._revision = 0

    async def get(self, key: str) -> Entry | None:
        """The newest value."""
        return self._entries.get(key)

    async def put(self, key: str, value: bytes) -> int:
        """Write whatever is there."""
        self._revision += 1
        self._entries[key] = Entry(key, value, self._revision)
        return self._revision

    async def create(self, key: str, value: bytes) -> int:
        """Write where nothing is."""
        if key in self._entries:
            raise KeyConflict(key)
        return await self.put(key, value)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Write over exactly `revision`."""
        found = self._entries.get(key)
        if found is None or found.revision != revision:
            raise KeyConflict(key)
        return await self.put(key, value)

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Remove; absent keys are fine."""
        found = self._entries.get(key)
        if found is not None and revision is not None and found.revision != revision:
            raise KeyConflict(key)
        if self._entries.pop(key, None) is not None:
            self._revision += 1

    async def entries(self) -> list[Entry]:
        """All, in key order."""
        return [self._entries[key] for key in sorted(self._entries)]
