"""Following a run shows every step, survives silence, and ends as the run does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import pytest

from dcnr.bus import subjects
from dcnr.bus.api import failure, ok
from dcnr.bus.codec import encode
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import SessionMetrics, StepMetrics
from dcnr.cli import follow
from dcnr.cli.follow import Follower, follower
from dcnr.errors import DcnrError, NotFound
from dcnr.ids import SessionId

SESSION = SessionId("s")


class Record:
    """A view that remembers."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.notes: list[str] = []
        self.end: tuple[str, float | None] | None = None
        self.other_end: tuple[str, int, str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def step(self, row: StepMetrics) -> None:
        """A step."""
        self.steps.append(row.step)

    def note(self, text: str) -> None:
        """A note."""
        self.notes.append(text)

    def done(self, session: str, final_loss: float | None) -> None:
        """The end."""
        self.end = (session, final_loss)

    def ended(self, session: str, state: str, step: int, reason: str) -> None:
        """Another end."""
        self.other_end = (state, step, reason)


class Orchestrator:
    """Says what a test wants said about session `s`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.bus = broker.connect()
        self.shown: dict[str, Any] | None = None
        self.asked = 0

    async def answer(self, data: bytes) -> bytes:
        """`session.show`."""
        self.asked += 1
        return failure(NotFound("no such session")) if self.shown is None else ok(self.shown)

    async def step(self, number: int, loss: float) -> None:
        """A row."""
        row = StepMetrics(SESSION, number, loss, 1e-3, 1.0, 1.0, False, 100.0, 10.0)
        await self.bus.publish(subjects.metrics("step", SESSION), encode(row))

    async def state(self, state: str, reason: str = "", fault: bool = False) -> None:
        """A change."""
        await self.bus.publish(subjects.metrics("session", SESSION), encode(SessionMetrics(SESSION, state, 0, reason, fault)))


@asynccontextmanager
async def story() -> AsyncIterator[tuple[Orchestrator, Follower, Record]]:
    """An orchestrator, a follower of its session, and what was seen."""
    broker = MemoryBroker()
    orchestrator, client = Orchestrator(broker), broker.connect()
    await orchestrator.bus.serve(subjects.api("session.show"), orchestrator.answer)
    async with follower(client, SESSION) as one:
        yield orchestrator, one, Record()
    await client.close()
    await orchestrator.bus.close()


async def test_a_run_that_ends_well() -> None:
    """Steps in order, then the end with the last loss."""
    async with story() as (orchestrator, one, record):
        await orchestrator.state("running")
        await orchestrator.step(1, 3.0)
        await orchestrator.step(2, 2.5)
        await orchestrator.state("done")
        await one.follow(record)
    assert (record.steps, record.end, record.other_end, record.notes) == ([1, 2], ("s", 2.5), None, [])


async def test_a_run_that_fails() -> None:
    """The run's own reason is the error."""
    async with story() as (orchestrator, one, record):
        await orchestrator.step(1, 3.0)
        await orchestrator.state("failed", "agent-1: out of memory")
        with pytest.raises(DcnrError, match="failed at step 1: agent-1: out of memory"):
            await one.follow(record)
    assert (record.end, record.other_end) == (None, ("failed", 1, "agent-1: out of memory"))


async def test_a_run_that_is_suspended_by_a_fault() -> None:
    """An error that says how to go on."""
    async with story() as (orchestrator, one, record):
        await orchestrator.step(1, 3.0)
        await orchestrator.state("suspended", "PNode a is gone", fault=True)
        with pytest.raises(DcnrError, match=r"is suspended at step 1: PNode a is gone \(go on with `dcnr session resume s`\)"):
            await one.follow(record)
    assert (record.other_end, record.notes) == (("suspended", 1, "PNode a is gone"), [])


async def test_a_run_that_is_suspended_by_request() -> None:
    """A note."""
    async with story() as (orchestrator, one, record):
        await orchestrator.state("suspended", "suspended by request")
        await one.follow(record)
    assert record.other_end == ("suspended", 0, "suspended by request")
    assert record.notes == ["session s is suspended at step 0: suspended by request"]


async def test_waiting_is_told_once_if_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment of it is normal and not told; a lasting reason is told, and not repeated."""
    monkeypatch.setattr(follow, "ASK_EVERY", 0.01)
    async with story() as (orchestrator, one, record):
        await orchestrator.state("waiting", "for a moment")
        orchestrator.shown = {"state": "waiting", "step": 0, "loss": None, "reason": "no PNode has 3 GiB", "fault": False}
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            group.create_task(one.follow(record))
            while orchestrator.asked < 3:
                await asyncio.sleep(0.01)
            await orchestrator.state("suspended")
    assert record.notes == ["session s is waiting: no PNode has 3 GiB", "session s is suspended at step 0"]


@pytest.mark.parametrize(
    ("shown", "end", "notes"),
    [
        ({"state": "done", "step": 9, "loss": 1.5, "reason": "", "fault": False}, ("s", 1.5), []),
        (
            {"state": "suspended", "step": 4, "loss": 1.5, "reason": "suspended by request", "fault": False},
            None,
            ["session s is suspended at step 4: suspended by request"],
        ),
        (None, None, ["session s is deleted at step 0"]),
    ],
)
async def test_silence_is_filled_by_asking(
    shown: dict[str, Any] | None, end: tuple[str, float] | None, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost metrics never leave a command hanging."""
    monkeypatch.setattr(follow, "ASK_EVERY", 0.01)
    async with story() as (orchestrator, one, record):
        orchestrator.shown = shown
        async with asyncio.timeout(10):
            await one.follow(record)
    assert (record.end, record.notes) == (end, notes)


async def test_an_old_run_is_asked_for_first() -> None:
    """Its end is shown without waiting for a silence."""
    async with story() as (orchestrator, one, record):
        orchestrator.shown = {"state": "done", "step": 9, "loss": 1.5, "reason": "", "fault": False}
        async with asyncio.timeout(follow.ASK_EVERY / 2):
            await one.follow(record, old=True)
    assert record.end == ("s", 1.5)


async def test_the_fault_of_an_old_run_is_an_error() -> None:
    """As if one had watched it."""
    async with story() as (orchestrator, one, record):
        orchestrator.shown = {"state": "suspended", "step": 4, "loss": 1.5, "reason": "PNode a is gone", "fault": True}
        with pytest.raises(DcnrError, match="PNode a is gone"):
            await one.follow(record, old=True)
    assert record.other_end == ("suspended", 4, "PNode a is gone")
