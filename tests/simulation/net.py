"""The server and the ways to it: who hears what, when, how often, and whether at all.

Rule 1: what travels is bytes; whoever sends and whoever hears do the encoding.
Rule 2: each hearer of a message has a fate of its own: lost, repeated, late.
Rule 3: what was under way when the server went down is lost; what is said meanwhile is lost, or sent when it is back, as clients do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TypeVar

from dcnr.bus.base import Entry
from dcnr.bus.memory import MemoryKv, matches
from dcnr.errors import WorldError
from tests.simulation.process import AnyProcess
from tests.simulation.scheduler import Scheduler

T = TypeVar("T")
Handler = Callable[[bytes], None]


@dataclass(slots=True)
class Noise:
    """What happens to messages by chance. Probabilities, and seconds."""

    lose: float = 0.0
    repeat: float = 0.0
    late: float = 0.0
    late_by: float = 0.0
    jitter: float = 0.001
    ordered: bool = True
    """Whether two messages from one process to another always come in the order in which they were sent."""


@dataclass(eq=False, slots=True)
class Interest:
    """One subscription."""

    pattern: str
    process: AnyProcess
    handler: Handler


@dataclass
class Net:
    """One server and everybody's connection to it."""

    scheduler: Scheduler
    rng: Random
    noise: Noise = field(default_factory=Noise)
    up: bool = True
    mute: set[str] = field(default_factory=set)
    """Processes from whom nothing comes to the server."""
    deaf: set[str] = field(default_factory=set)
    """Processes to whom nothing comes from the server."""
    apart: set[tuple[str, str]] = field(default_factory=set)
    """(from, to) between whom tensors are lost."""
    doomed: dict[str, set[int]] = field(default_factory=dict)
    """By kind of message: which ones of it, counted from 1, are lost for everyone."""
    sent: Counter[str] = field(default_factory=Counter)
    """Messages by kind."""
    buckets: dict[str, MemoryKv] = field(default_factory=dict)
    _interests: list[Interest] = field(default_factory=list)
    _exact: dict[str, list[Interest]] = field(default_factory=dict)
    _life: int = 0
    """How often the server went down."""
    _last: dict[tuple[str, str], float] = field(default_factory=dict)
    _unsent: list[tuple[AnyProcess, str, bytes, str]] = field(default_factory=list)

    def subscribe(self, process: AnyProcess, pattern: str, handler: Handler) -> Interest:
        """Hear a subject from now on."""
        interest = Interest(pattern, process, handler)
        if "*" in pattern or ">" in pattern:
            self._interests.append(interest)
        else:
            self._exact.setdefault(pattern, []).append(interest)
        return interest

    def unsubscribe(self, interest: Interest) -> None:
        """Hear it no more; what is under way still comes."""
        where = self._interests if interest in self._interests else self._exact[interest.pattern]
        where.remove(interest)

    def leave(self, process: AnyProcess) -> None:
        """Its connections are closed."""
        self._interests = [one for one in self._interests if one.process is not process]
        for subject, known in list(self._exact.items()):
            self._exact[subject] = [one for one in known if one.process is not process]

    def publish(self, sender: AnyProcess, subject: str, data: bytes, kind: str) -> None:
        """Send to everyone who listens."""
        self.sent[kind] += 1
        if self.sent[kind] in self.doomed.get(kind, ()):
            return
        if not self.up:
            if self.rng.random() < 0.5:
                self._unsent.append((sender, subject, data, kind))
            return
        if sender.name in self.mute:
            return
        wild = [one for one in self._interests if matches(one.pattern, subject)]
        for interest in (*self._exact.get(subject, ()), *wild):
            self._carry(sender, interest, data, kind)

    def bucket(self, name: str) -> MemoryKv:
        """A bucket of the server, which keeps them when it goes down."""
        return self.buckets.setdefault(name, MemoryKv())

    def go_down(self) -> None:
        """The server dies."""
        self.up = False
        self._life += 1

    def come_up(self) -> None:
        """It is back, and so are the connections of those that live."""
        self.up = True
        unsent, self._unsent = self._unsent, []
        for sender, subject, data, kind in unsent:
            if sender.alive:
                self.sent[kind] -= 1
                self.publish(sender, subject, data, kind)

    def _carry(self, sender: AnyProcess, interest: Interest, data: bytes, kind: str) -> None:
        to = interest.process
        if (sender.name, to.name) in self.apart and kind.startswith("Hop"):
            return
        noise, rng = self.noise, self.rng
        if noise.lose and rng.random() < noise.lose:
            return
        copies = 2 if noise.repeat and rng.random() < noise.repeat else 1
        for _ in range(copies):
            delay = 0.0002 + rng.random() * noise.jitter
            if noise.late and rng.random() < noise.late:
                delay += rng.random() * noise.late_by
            when = self.scheduler.now + delay
            if noise.ordered:
                way = (sender.name, to.name)
                when = self._last[way] = max(when, self._last.get(way, 0.0))
            self.scheduler.at(when, partial(self._arrive, interest, data, self._life))

    def _arrive(self, interest: Interest, data: bytes, life: int) -> None:
        to = interest.process
        if life == self._life and to.name not in self.deaf and to.alive:
            to.hear(lambda: interest.handler(data))


class Reached:
    """A bucket as one process reaches it: without an answer a write may have been applied all the same. The methods are those of `Kv`."""

    replicas = 1

    def __init__(self, kv: MemoryKv, net: Net, name: str) -> None:
        self._kv = kv
        self._net = net
        self._name = name

    async def get(self, key: str) -> Entry | None:
        """The newest value."""
        return await self._ask(self._kv.get(key))

    async def put(self, key: str, value: bytes) -> int:
        """Write whatever is there."""
        return await self._ask(self._kv.put(key, value))

    async def create(self, key: str, value: bytes) -> int:
        """Write where nothing is."""
        return await self._ask(self._kv.create(key, value))

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Write over exactly `revision`."""
        return await self._ask(self._kv.update(key, value, revision))

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Remove."""
        await self._ask(self._kv.delete(key, revision))

    async def entries(self) -> list[Entry]:
        """All, in key order."""
        return await self._ask(self._kv.entries())

    async def _ask(self, work: Coroutine[None, None, T]) -> T:
        if not self._net.up or self._name in self._net.mute:
            work.close()
            raise WorldError(f"{self._name} does not reach the server")
        result = await work
        if self._name in self._net.deaf:
            raise WorldError(f"{self._name} gets no answer")
        return result
