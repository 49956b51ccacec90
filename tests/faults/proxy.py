"""A bad network between NATS clients and their server: it reads the protocol, and does to messages what networks do.

Rule 1: frames are whole. A message is lost, repeated, held back or overtaken as one; the stream itself never breaks within a frame.
Rule 2: only messages on `dcnr.>` subjects are touched, on their way to the server, so each of them exactly once. What JetStream needs, and
the protocol's own frames, pass untouched and in order. A connection that is cut or deaf is so for every frame.
Rule 3: what happens is drawn from a seed.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

Direction = Literal["up", "down"]
"""To the server, or from it."""
BOTH: tuple[Direction, Direction] = ("up", "down")
_WITH_BODY = {b"PUB", b"HPUB", b"MSG", b"HMSG"}
_ABOUT_CLIENT = {b"CONNECT", b"SUB", b"UNSUB"}
_READ = 1 << 16


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame: `raw` is all of it; `subject` and `body` (headers included) are empty where its verb has none."""

    verb: bytes
    raw: bytes
    subject: str = ""
    body: bytes = b""


class Frames:
    """Bytes in any portions in, whole frames out."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete now."""
        self._held += data
        while (frame := self._next()) is not None:
            del self._held[: len(frame.raw)]
            yield frame

    def _next(self) -> Frame | None:
        end = self._held.find(b"\r\n")
        if end < 0:
            return None
        words = bytes(self._held[:end]).split()
        verb = words[0].upper() if words else b""
        if verb not in _WITH_BODY:
            return Frame(verb, bytes(self._held[: end + 2]))
        start, size = end + 2, int(words[-1])
        if len(self._held) < start + size + 2:
            return None
        raw = bytes(self._held[: start + size + 2])
        return Frame(verb, raw, words[1].decode(), raw[start : start + size])


@dataclass(frozen=True, slots=True)
class Weather:
    """Shares (0 to 1) of messages that are lost, sent twice, or overtaken by later ones; seconds that every message is late, at most."""

    loss: float = 0.0
    twice: float = 0.0
    overtaken: float = 0.0
    late: float = 0.0


FINE = Weather()
OVERTAKEN_BY = 0.03
"""Seconds that an overtaken message is held back, at most."""

Tap = Callable[[str, str, bytes], None]
"""Called with (client, subject, body) before a message on `dcnr.>` goes on."""


@dataclass(slots=True, eq=False)
class Link:
    """One client's connection. `deaf`: directions in which nothing arrives any more; `interests`: what it subscribes to, by number."""

    down: asyncio.StreamWriter
    up: asyncio.StreamWriter
    client: str = ""
    deaf: set[Direction] = field(default_factory=set)
    interests: dict[str, str] = field(default_factory=dict)

    def note(self, frame: Frame) -> None:
        """Remember who speaks, and what it listens to."""
        match frame.verb, frame.raw.decode(errors="replace").split() if frame.verb in _ABOUT_CLIENT else []:
            case b"CONNECT", _:
                self.client = str(json.loads(frame.raw[len(b"CONNECT") :]).get("name") or "")
            case b"SUB", [_, subject, *_, number]:
                self.interests[number] = subject
            case b"UNSUB", [_, number]:
                self.interests.pop(number, None)
            case _:
                return

    def abort(self) -> None:
        """Both ends see a reset."""
        for writer in (self.down, self.up):
            writer.transport.abort()


class Lane:
    """Frames of one direction of a link on their way, each with the moment at which it is due."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._waiting: list[tuple[float, int, bytes]] = []
        self._number = 0
        self._last = 0.0
        self._more = asyncio.Event()

    def put(self, raw: bytes, late: float = 0.0, overtaken: float = 0.0) -> None:
        """Send, `late` seconds from now and not before earlier frames; `overtaken` seconds later still, past whatever comes then."""
        due = self._last = max(self._last, asyncio.get_running_loop().time() + late)
        heapq.heappush(self._waiting, (due + overtaken, self._number, raw))
        self._number += 1
        self._more.set()

    async def drain(self, allowed: asyncio.Event) -> None:
        """Send until cancelled or the other end is gone; nothing while it is not `allowed`."""
        loop = asyncio.get_running_loop()
        while True:
            await allowed.wait()
            while self._waiting and self._waiting[0][0] <= loop.time() and allowed.is_set():
                self._writer.write(heapq.heappop(self._waiting)[2])
            await self._writer.drain()
            self._more.clear()
            pause = max(0.0, self._waiting[0][0] - loop.time()) if self._waiting else None
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._more.wait()


class Proxy:
    """An async context manager in front of the server at `target`; `url` is for clients. `target` may change while the server is away."""

    def __init__(self, target: str, seed: int) -> None:
        self.target = target
        self.url = ""
        self.weather = FINE
        self.counts: Counter[str] = Counter()
        """What was done to messages."""
        self.tap: Tap | None = None
        self._draw = random.Random(seed)
        self._links: set[Link] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_READ)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for link in self._links:
            link.abort()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- what can be done to connections -----------------------------------------------------------------------------------

    def links(self, client: str = "") -> list[Link]:
        """Connections of clients whose name starts so."""
        return [link for link in self._links if link.client.startswith(client)]

    def cut(self, client: str = "") -> int:
        """Reset connections; their number."""
        found = self.links(client)
        for link in found:
            link.abort()
        return len(found)

    def deafen(self, direction: Direction, client: str = "") -> int:
        """From now on nothing arrives in that direction, for as long as these connections live; their number."""
        found = self.links(client)
        for link in found:
            link.deaf.add(direction)
        return len(found)

    def stall(self) -> None:
        """Nothing moves, and no connection breaks, until `flow`."""
        self._flowing.clear()

    def flow(self) -> None:
        """Go on after `stall`."""
        self._flowing.set()

    # -- one connection ----------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, down: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._carry(reader, down)
        finally:
            self._tasks.discard(task)
            down.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, down: asyncio.StreamWriter) -> None:
        parts = urlsplit(self.target)
        try:
            above, up = await asyncio.open_connection(parts.hostname, parts.port, limit=_READ)
        except OSError:
            return  # the server is away, and the client sees so
        link = Link(down, up)
        self._links.add(link)
        upward, downward = Lane(up), Lane(down)
        work = [
            self._pump(reader, link, "up", upward),
            self._pump(above, link, "down", downward),
            upward.drain(self._flowing),
            downward.drain(self._flowing),
        ]
        tasks = [asyncio.ensure_future(one) for one in work]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._links.discard(link)
            link.abort()
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, link: Link, direction: Direction, lane: Lane) -> None:
        frames = Frames()
        while data := await reader.read(_READ):
            for frame in frames.feed(data):
                link.note(frame)
                if direction in link.deaf:
                    self.counts["unheard"] += 1
                elif direction == "up" and frame.subject.startswith("dcnr."):
                    self._send(link, frame, lane)
                else:
                    lane.put(frame.raw)
        await asyncio.sleep(0)  # what was read last is sent before the link ends

    def _send(self, link: Link, frame: Frame, lane: Lane) -> None:
        """A message, and the weather."""
        if self.tap is not None:
            self.tap(link.client, frame.subject, frame.body)
        weather, draw = self.weather, self._draw
        if weather is FINE:
            lane.put(frame.raw)
            return
        if draw.random() < weather.loss:
            self.counts["lost"] += 1
            return
        late = draw.random() * weather.late
        overtaken = draw.random() * OVERTAKEN_BY if draw.random() < weather.overtaken else 0.0
        self.counts["overtaken"] += overtaken > 0
        lane.put(frame.raw, late, overtaken)
        if draw.random() < weather.twice:
            self.counts["twice"] += 1
            lane.put(frame.raw, late, draw.random() * OVERTAKEN_BY)
