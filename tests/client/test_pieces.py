"""A text as it comes: what is lost is asked for again, and nothing is shown twice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dcnr.bus import subjects
from dcnr.bus.api import arguments, failure, ok
from dcnr.bus.base import Bus
from dcnr.bus.memory import MemoryBroker
from dcnr.client import generation
from dcnr.client.generation import generate
from dcnr.errors import BusUnavailable, DcnrError, NotFound, UserError

TEXT = "one two three"
WANTED = {"session": "s", "prompt": "zero "}


class Orchestrator:
    """Says `TEXT` word by word. `troubles`: errors that come instead of answers to `next`, by the number of the question."""

    def __init__(self, troubles: dict[int, DcnrError] | None = None, fails: bool = False) -> None:
        self.troubles = troubles or {}
        self.fails = fails
        self.begun: list[dict[str, Any]] = []
        self.asked: list[tuple[str, int]] = []
        self.stopped: list[str] = []

    def start(self, fields: dict[str, Any]) -> dict[str, Any]:
        """`generate`."""
        self.begun.append(fields)
        return {"request": f"r{len(self.begun)}", "session": fields["session"], "step": 7, "prompt_tokens": 1}

    def next(self, fields: dict[str, Any]) -> dict[str, Any]:
        """`generate.next`."""
        self.asked.append((fields["request"], fields["after"]))
        if error := self.troubles.get(len(self.asked)):
            raise error
        after = fields["after"]
        end = after + len((TEXT[after:].partition(" ")[0] + " ")[: len(TEXT) - after])
        told = {"text": TEXT[after:end], "after": end, "tokens": 1, "positions": 1, "state": "serving", "waits": ""}
        return {**told, "done": end == len(TEXT), "failed": self.fails, "reason": "it broke" if self.fails else "length"}

    def stop(self, fields: dict[str, Any]) -> dict[str, Any]:
        """`generate.stop`."""
        self.stopped.append(fields["request"])
        return {}


@asynccontextmanager
async def serving(one: Orchestrator) -> AsyncIterator[Bus]:
    """A bus on which it answers."""
    bus = MemoryBroker().connect()
    for verb, do in {"generate": one.start, "generate.next": one.next, "generate.stop": one.stop}.items():

        async def handler(data: bytes, do: Any = do) -> bytes:
            try:
                return ok(do(arguments(data)))
            except DcnrError as error:
                return failure(error)

        await bus.serve(subjects.api(verb), handler)
    yield bus
    await bus.close()


async def text_of(bus: Bus) -> str:
    """All of it."""
    return "".join([piece.text async for piece in generate(bus, WANTED)])


async def test_a_text_comes_piece_by_piece() -> None:
    """And its request is not stopped when it has ended."""
    one = Orchestrator()
    async with serving(one) as bus:
        assert await text_of(bus) == TEXT
    assert one.asked == [("r1", 0), ("r1", 4), ("r1", 8)]
    assert one.stopped == []


async def test_an_orchestrator_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same question."""
    monkeypatch.setattr(generation, "ASK_EVERY", 0.0)
    one = Orchestrator({2: BusUnavailable("no orchestrator answers")})
    async with serving(one) as bus:
        assert await text_of(bus) == TEXT
    assert one.asked == [("r1", 0), ("r1", 4), ("r1", 4), ("r1", 8)]


async def test_one_that_has_forgotten_the_request_is_asked_for_all_of_it_again() -> None:
    """Of the very checkpoint; what was shown is not shown again."""
    one = Orchestrator({2: NotFound("no request 'r1'")})
    async with serving(one) as bus:
        assert await text_of(bus) == TEXT
    assert one.begun == [WANTED, {**WANTED, "step": 7}]
    assert one.asked[2:] == [("r2", 4), ("r2", 8)]


async def test_who_is_gone_for_good_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while."""
    monkeypatch.setattr(generation, "PATIENCE", 0.0)
    one = Orchestrator({1: BusUnavailable("no orchestrator answers")})
    async with serving(one) as bus:
        with pytest.raises(BusUnavailable):
            await text_of(bus)


async def test_what_went_wrong_is_an_error() -> None:
    """In the words of the orchestrator."""
    async with serving(Orchestrator(fails=True)) as bus:
        with pytest.raises(UserError, match="it broke"):
            await text_of(bus)


async def test_who_listens_no_more_stops_it() -> None:
    """As on Ctrl-C."""
    one = Orchestrator()
    async with serving(one) as bus:
        pieces = generate(bus, WANTED)
        assert (await anext(pieces)).text == "one "
        await pieces.aclose()
    assert one.stopped == ["r1"]
