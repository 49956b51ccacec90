"""Text comes piece by piece, and lost answers or another orchestrator change nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from dcnr.bus.api import arguments, failure, ok
from dcnr.bus.base import Handler, Subscription
from dcnr.bus.memory import MemoryBroker, MemoryBus
from dcnr.client import generation
from dcnr.client.cluster import Cluster
from dcnr.errors import DcnrError, NotFound, UserError

TEXT = "It was a dark and stormy night."


class Writer:
    """Answers the verbs: five characters more with every question. `forgets`: the questions before which the requests are lost."""

    def __init__(self, forgets: frozenset[int] = frozenset(), fails: bool = False) -> None:
        self.asked: list[dict[str, Any]] = []
        self.questions: list[tuple[str, int]] = []
        self.stopped: list[str] = []
        self._forgets = forgets
        self._fails = fails
        self._known: dict[str, int] = {}
        self._served: list[Subscription] = []

    async def serve(self, bus: MemoryBus) -> None:
        """Answer from now on."""
        verbs: dict[str, Callable[[dict[str, Any]], bytes]] = {
            "generate": self._start,
            "generate.next": self._next,
            "generate.stop": self._stop,
        }
        self._served = [await bus.serve(f"dcnr.api.{verb}", answering(answer)) for verb, answer in verbs.items()]

    async def leave(self) -> None:
        """Answer no more."""
        while self._served:
            await self._served.pop().stop()

    def _start(self, fields: dict[str, Any]) -> bytes:
        if not fields["prompt"]:
            return failure(UserError("the prompt is empty"))
        self.asked.append(fields)
        name = f"r{len(self.asked)}"
        self._known[name] = 0
        return ok({"request": name, "session": fields["session"], "step": 7})

    def _next(self, fields: dict[str, Any]) -> bytes:
        self.questions.append((fields["request"], fields["after"]))
        if len(self.questions) in self._forgets:
            self._known.clear()
        if fields["request"] not in self._known:
            return failure(NotFound("no request"))
        self._known[fields["request"]] += 5
        there = TEXT[: self._known[fields["request"]]]
        failed = self._fails and len(there) > 10
        done = failed or there == TEXT
        text, after = there[fields["after"] :], max(fields["after"], len(there))
        stands = {"tokens": after, "positions": after, "waits": "", "reason": "no PNode is left" if failed else ""}
        return ok({"text": text, "after": after, "done": done, "failed": failed, **stands})

    def _stop(self, fields: dict[str, Any]) -> bytes:
        self.stopped.append(fields["request"])
        return ok({})


def answering(answer: Callable[[dict[str, Any]], bytes]) -> Handler:
    """A verb."""

    async def handler(data: bytes) -> bytes:
        return answer(arguments(data))

    return handler


@asynccontextmanager
async def cluster_of(writer: Writer) -> AsyncIterator[tuple[Cluster, MemoryBus]]:
    """A client of it, and its own side of the bus."""
    broker = MemoryBroker()
    server, client = broker.connect(), broker.connect()
    await writer.serve(server)
    yield Cluster(client), server
    await client.close()
    await server.close()


async def test_the_pieces_are_the_text_and_the_options_travel() -> None:
    """What is not said is left to the orchestrator; a text that came to its end is not stopped."""
    writer = Writer()
    async with cluster_of(writer) as (cluster, _):
        pieces = [piece async for piece in cluster.generate("s", "Once", temperature=0.0, stop=["\n"])]
    assert "".join(pieces) == TEXT
    assert len(pieces) > 1
    assert writer.asked == [{"session": "s", "prompt": "Once", "temperature": 0.0, "stop": ["\n"]}]
    assert writer.questions == [("r1", after) for after in range(0, len(TEXT), 5)]
    assert writer.stopped == []


async def test_an_orchestrator_that_does_not_answer_is_asked_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was lost is not left out."""
    monkeypatch.setattr(generation, "ASK_EVERY", 0.01)
    writer = Writer()
    async with cluster_of(writer) as (cluster, server):
        pieces = cluster.generate("s", "Once")
        text = await anext(pieces)
        await writer.leave()
        coming = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)  # it has asked, and nobody was there
        await writer.serve(server)
        text += await coming
        text += "".join([piece async for piece in pieces])
    assert text == TEXT
    assert len(writer.asked) == 1
    assert writer.questions == [("r1", after) for after in range(0, len(TEXT), 5)]


async def test_another_orchestrator_goes_on_where_the_text_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for all of it again, and nothing comes twice; meanwhile nobody answers."""
    monkeypatch.setattr(generation, "ASK_EVERY", 0.01)
    writer = Writer(forgets=frozenset({3}))
    async with cluster_of(writer) as (cluster, server):
        text, back = "", list[asyncio.Future[None]]()
        async for piece in cluster.generate("s", "Once", seed=7):
            text += piece
            if len(text) == 5:
                await writer.leave()
                asyncio.get_running_loop().call_later(0.03, lambda: back.append(asyncio.ensure_future(writer.serve(server))))
    assert text == TEXT
    assert writer.questions[-1] == ("r2", 30)
    assert writer.asked == [{"session": "s", "prompt": "Once", "seed": 7}, {"session": "s", "prompt": "Once", "seed": 7, "step": 7}]


async def test_requests_that_are_lost_again_and_again_are_an_error() -> None:
    """Rather than an endless question."""
    writer = Writer(forgets=frozenset(range(1, 100)))
    async with cluster_of(writer) as (cluster, _):
        with pytest.raises(NotFound):
            _ = [piece async for piece in cluster.generate("s", "Once")]
    assert len(writer.asked) == generation.BEGINNINGS


async def test_what_is_refused_and_what_fails_is_raised() -> None:
    """In the orchestrator's words; what came before it, and with it, is given."""
    async with cluster_of(Writer()) as (cluster, _):
        with pytest.raises(UserError, match="prompt is empty"):
            _ = [piece async for piece in cluster.generate("s", "")]
    async with cluster_of(Writer(fails=True)) as (cluster, _):
        pieces = cluster.generate("s", "Once")
        assert "".join([await anext(pieces) for _ in range(3)]) == TEXT[:15]
        with pytest.raises(DcnrError, match="session s could not be gone on with: no PNode is left"):
            await anext(pieces)


async def test_whoever_stops_reading_ends_the_text() -> None:
    """So that nothing is computed for nobody."""
    writer = Writer()
    async with cluster_of(writer) as (cluster, _), aclosing(cluster.generate("s", "Once")) as pieces:
        async for _piece in pieces:
            break
    assert writer.stopped == ["r1"]


async def test_nobody_there_is_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some patience."""
    monkeypatch.setattr(generation, "ASK_EVERY", 0.01)
    monkeypatch.setattr(generation, "PATIENCE", 0.05)
    writer = Writer()
    async with cluster_of(writer) as (cluster, _):
        await writer.leave()
        with pytest.raises(UserError, match="no orchestrator answers"):
            _ = [piece async for piece in cluster.generate("s", "Once")]
