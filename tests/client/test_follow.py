"""Following a run shows every step, survives silence, and ends as the run does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import pytest

from dcnr.bus import subjects
from dcnr.bus.api import arguments, failure, ok
from dcnr.bus.base import Handler, Subscription
from dcnr.bus.codec import encode
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import SessionMetrics, StepMetrics, ValidationMetrics
from dcnr.client import follow
from dcnr.client.follow import End, Follower, Note, follower
from dcnr.errors import DcnrError, NotFound
from dcnr.ids import Epoch, SessionId
from tests.bus.contract import until

SESSION = SessionId("s")


class Record:
    """What was told."""

    def __init__(self) -> None:
        self.news: list[int | str] = []
        """Steps, and validations as texts, as they came."""
        self.notes: list[str] = []
        self.end: tuple[str, float | None] | None = None
        self.other_end: tuple[str, int, str] | None = None

    @property
    def steps(self) -> list[int]:
        """The steps."""
        return [one for one in self.news if isinstance(one, int)]


async def watch(one: Follower, record: Record, old: bool = False) -> None:
    """Take everything down; what is before an `old` run is of no interest. Raises what a run failed of."""
    async for news in one.news(None if old else 1, old):
        match news:
            case StepMetrics():
                record.news.append(news.step)
            case ValidationMetrics():
                record.news.append(f"{news.step}: {news.loss:g}")
            case Note(text):
                record.notes.append(text)
            case End(state="done"):
                record.end = (news.session, news.loss)
            case End():
                record.other_end = (news.state, news.step, news.reason)
                if news.error is not None:
                    raise news.error
                record.notes.append(str(news))


def validation(step: int, loss: float, epoch: int = 0) -> ValidationMetrics:
    """Of a step."""
    return ValidationMetrics(SESSION, step, loss, 2.0, 1.0, 100, True, Epoch(epoch))


class Orchestrator:
    """Says what a test wants said about session `s`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.bus = broker.connect()
        self.shown: dict[str, Any] | None = None
        self.asked = 0
        self.log: dict[int, StepMetrics] = {}
        """What it knows of each step."""
        self.validated: dict[int, ValidationMetrics] = {}
        self.served: list[Subscription] = []

    async def serve(self) -> None:
        """Answer from now on."""
        self.served = [await self.bus.serve(subjects.api(f"session.{verb}"), answer) for verb, answer in self.verbs()]

    async def leave(self) -> None:
        """Answer no more."""
        while self.served:
            await self.served.pop().stop()

    def verbs(self) -> list[tuple[str, Handler]]:
        """What it answers."""
        return [("show", self.answer), ("rows", self.rows)]

    async def answer(self, data: bytes) -> bytes:
        """`session.show`."""
        self.asked += 1
        return failure(NotFound("no such session")) if self.shown is None else ok(self.shown)

    async def rows(self, data: bytes) -> bytes:
        """`session.rows`."""
        asked = arguments(data)
        known = [asdict(row) for step, row in sorted(self.log.items()) if asked["first"] <= step <= asked["last"]]
        validated = [asdict(one) for step, one in sorted(self.validated.items()) if asked["first"] <= step <= asked["last"]]
        return ok({"rows": known[:2], "validations": validated})

    def know(self, *steps: int) -> None:
        """Rows that are in its log."""
        self.log |= {step: StepMetrics(SESSION, step, 1.0 / step, 1e-3, 1.0, 1.0, False, 100.0, 10.0) for step in steps}

    async def step(self, number: int, loss: float, epoch: int = 0) -> None:
        """A row."""
        row = StepMetrics(SESSION, number, loss, 1e-3, 1.0, 1.0, False, 100.0, 10.0, Epoch(epoch))
        await self.bus.publish(subjects.metrics("step", SESSION), encode(row))

    async def validation(self, step: int, loss: float, epoch: int = 0) -> None:
        """A validation."""
        await self.bus.publish(subjects.metrics("validation", SESSION), encode(validation(step, loss, epoch)))

    async def state(self, state: str, reason: str = "", step: int = 0) -> None:
        """A change."""
        await self.bus.publish(subjects.metrics("session", SESSION), encode(SessionMetrics(SESSION, state, step, reason)))


@asynccontextmanager
async def story() -> AsyncIterator[tuple[Orchestrator, Follower, Record]]:
    """An orchestrator, a follower of its session, and what was seen."""
    broker = MemoryBroker()
    orchestrator, client = Orchestrator(broker), broker.connect()
    await orchestrator.serve()
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
        await watch(one, record)
    assert (record.steps, record.end, record.other_end, record.notes) == ([1, 2], ("s", 2.5), None, [])


async def test_a_run_that_fails() -> None:
    """The run's own reason is the error."""
    async with story() as (orchestrator, one, record):
        await orchestrator.step(1, 3.0)
        await orchestrator.state("failed", "agent-1: out of memory")
        with pytest.raises(DcnrError, match="failed at step 1: agent-1: out of memory"):
            await watch(one, record)
    assert (record.end, record.other_end) == (None, ("failed", 1, "agent-1: out of memory"))


async def test_a_run_that_is_suspended_by_request() -> None:
    """A note."""
    async with story() as (orchestrator, one, record):
        await orchestrator.state("suspended", "suspended by request")
        await watch(one, record)
    assert record.other_end == ("suspended", 0, "suspended by request")
    assert record.notes == ["session s is suspended at step 0: suspended by request"]


async def test_waiting_is_told_once_if_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment of it is normal and not told; a lasting reason is told, and not repeated."""
    monkeypatch.setattr(follow, "ASK_EVERY", 0.01)
    async with story() as (orchestrator, one, record):
        await orchestrator.state("waiting", "for a moment")
        orchestrator.shown = {"state": "waiting", "step": 0, "loss": None, "reason": "no PNode has 3 GiB"}
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            group.create_task(watch(one, record))
            while orchestrator.asked < 3:
                await asyncio.sleep(0.01)
            await orchestrator.state("suspended")
    assert record.notes == ["session s is waiting: no PNode has 3 GiB", "session s is suspended at step 0"]


@pytest.mark.parametrize(
    ("shown", "end", "notes"),
    [
        ({"state": "done", "step": 9, "loss": 1.5, "reason": ""}, ("s", 1 / 9), []),
        (
            {"state": "suspended", "step": 4, "loss": 1.5, "reason": "suspended by request"},
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
        orchestrator.know(*range(1, (shown or {"step": 0})["step"] + 1))
        async with asyncio.timeout(10):
            await watch(one, record)
    assert record.steps == sorted(orchestrator.log)
    assert (record.end, record.notes) == (end, notes)


async def test_an_old_run_is_asked_for_first() -> None:
    """Its end is shown without waiting for a silence."""
    async with story() as (orchestrator, one, record):
        orchestrator.shown = {"state": "done", "step": 9, "loss": 1.5, "reason": ""}
        async with asyncio.timeout(follow.ASK_EVERY / 2):
            await watch(one, record, old=True)
    assert record.end == ("s", 1.5)


async def test_the_failure_of_an_old_run_is_an_error() -> None:
    """As if one had watched it."""
    async with story() as (orchestrator, one, record):
        orchestrator.shown = {"state": "failed", "step": 4, "loss": 1.5, "reason": "PNode a: out of memory"}
        with pytest.raises(DcnrError, match="PNode a: out of memory"):
            await watch(one, record, old=True)
    assert record.other_end == ("failed", 4, "PNode a: out of memory")


def standing(state: str, step: int, reason: str = "") -> dict[str, Any]:
    """What `session.show` says."""
    return {"state": state, "step": step, "loss": 0.5, "reason": reason}


async def test_a_lost_row_is_asked_for_and_rows_are_shown_in_order() -> None:
    """In the middle, when the next one is heard."""
    async with story() as (orchestrator, one, record):
        orchestrator.know(1, 2, 3, 4, 5, 6)
        await orchestrator.step(1, 1.0)
        await orchestrator.step(6, 0.25)
        await orchestrator.state("done", step=6)
        await watch(one, record)
    assert (record.steps, record.end, record.notes) == ([1, 2, 3, 4, 5, 6], ("s", 0.25), [])


async def test_the_last_rows_are_asked_for_before_the_end_is_shown() -> None:
    """The end may also be heard before the rows that came before it."""
    async with story() as (orchestrator, one, record):
        orchestrator.know(1, 2, 3, 4)
        await orchestrator.step(1, 1.0)
        await orchestrator.state("done", step=4)
        await orchestrator.step(2, 0.5)
        await watch(one, record)
    assert (record.steps, record.end) == ([1, 2, 3, 4], ("s", 0.25))


async def test_rows_that_nobody_knows_are_told_of_and_do_not_stop_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for several times first, since a log is written a moment later."""
    monkeypatch.setattr(follow, "FILL_EVERY", 0.01)
    async with story() as (orchestrator, one, record):
        orchestrator.know(1, 4)
        await orchestrator.step(4, 0.5)
        await orchestrator.state("done", step=5)
        await watch(one, record)
    assert (record.steps, record.end) == ([1, 4], ("s", 0.5))
    assert record.notes == ["nobody knows the numbers of step 2 to 3", "nobody knows the numbers of step 5"]


async def test_a_rolled_back_step_is_shown_once_and_the_recovery_told_in_a_line_each() -> None:
    """Repeated states are not told again; the progress goes on."""
    async with story() as (orchestrator, one, record):
        await orchestrator.state("deploying", "deploys to a, b")
        await orchestrator.state("running")
        for step in (1, 2, 3):
            await orchestrator.step(step, 1.0 / step, epoch=1)
        for _ in range(2):
            await orchestrator.state("waiting", "PNode b has been silent for 3.1 s; goes back to step 1", 1)
        await orchestrator.state("deploying", "deploys to a, c from step 1", 1)
        await orchestrator.state("running", step=1)
        for step in (2, 3, 4):
            await orchestrator.step(step, 1.0 / step, epoch=2)
        await orchestrator.state("done", step=4)
        await watch(one, record)
    assert record.steps == [1, 2, 3, 4]
    assert record.notes == [
        "session s is waiting: PNode b has been silent for 3.1 s; goes back to step 1",
        "session s is deploying: deploys to a, c from step 1",
        "session s is running again",
    ]


async def test_an_orchestrator_that_is_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One note that it is, one that it is back; the rows that were missed meanwhile are there."""
    monkeypatch.setattr(follow, "ASK_EVERY", 0.02)
    monkeypatch.setattr(follow, "FILL_EVERY", 0.02)
    async with story() as (orchestrator, one, record):
        orchestrator.shown = standing("running", 1)
        await orchestrator.step(1, 1.0)
        await orchestrator.leave()
        following = asyncio.create_task(watch(one, record))
        await until(lambda: len(record.notes) == 1)
        await asyncio.sleep(5 * follow.ASK_EVERY)
        assert not following.done()
        orchestrator.know(1, 2, 3, 4)
        await orchestrator.serve()
        await until(lambda: len(record.notes) == 2)
        await orchestrator.step(4, 0.25)
        await orchestrator.state("done", step=4)
        await following
    assert record.steps == [1, 2, 3, 4]
    assert record.notes == ["the orchestrator does not answer; waiting for it", "the orchestrator answers again"]


async def test_an_orchestrator_that_is_away_at_the_end_does_not_hold_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known is shown."""
    monkeypatch.setattr(follow, "FILL_EVERY", 0.01)
    async with story() as (orchestrator, one, record):
        await orchestrator.step(1, 1.0)
        await orchestrator.state("done", step=3)
        await orchestrator.leave()
        async with asyncio.timeout(10):
            await watch(one, record)
    assert (record.steps, record.end) == ([1], ("s", 1.0))
    assert record.notes == ["the orchestrator does not answer; waiting for it", "nobody knows the numbers of step 2 to 3"]


async def test_rows_behind_every_gap_are_shown_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and nobody answers."""
    monkeypatch.setattr(follow, "FILL_EVERY", 0.01)
    async with story() as (orchestrator, one, record):
        for step in (1, 3, 5):
            await orchestrator.step(step, 1.0 / step)
        await orchestrator.state("done", step=5)
        await orchestrator.leave()
        async with asyncio.timeout(10):
            await watch(one, record)
    assert (record.steps, record.end) == ([1, 3, 5], ("s", 0.2))


async def test_a_message_that_is_none_is_told_and_skipped() -> None:
    """Bus callbacks never raise, and a run is not over for it."""
    async with story() as (orchestrator, one, record):
        await orchestrator.bus.publish(subjects.metrics("step", SESSION), b"noise")
        await orchestrator.step(1, 1.0)
        await orchestrator.state("done", step=1)
        await watch(one, record)
    assert record.steps == [1]
    assert record.notes[0].startswith("a metric could not be read")


async def test_a_validation_is_told_after_its_step_and_once() -> None:
    """Whatever is rolled back, comes early or was lost and is looked up."""
    async with story() as (orchestrator, one, record):
        orchestrator.know(1, 2, 3, 4, 5, 6)
        orchestrator.validated[6] = validation(6, 0.6)
        await orchestrator.validation(2, 0.5)
        for step in (1, 2, 3):
            await orchestrator.step(step, 1.0 / step, epoch=1)
        await orchestrator.validation(2, 0.4, epoch=2)
        for step in (2, 3, 4):
            await orchestrator.step(step, 1.0 / step, epoch=2)
        await orchestrator.validation(4, 0.3, epoch=2)
        await orchestrator.state("done", step=6)
        await watch(one, record)
    assert record.news == [1, 2, "2: 0.5", 3, 4, "4: 0.3", 5, 6, "6: 0.6"]


async def test_who_joins_late_hears_validations_from_then_on() -> None:
    """The one of a step that was done before comes before the first row."""
    async with story() as (orchestrator, one, record):
        orchestrator.shown = standing("running", 4)
        await orchestrator.validation(4, 0.3)
        await orchestrator.step(5, 0.2)
        await orchestrator.state("done", step=5)
        await watch(one, record, old=True)
    assert record.news == ["4: 0.3", 5]


async def test_what_nobody_reads_is_bounded_and_looked_up_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that runs while its reader does something else fills no memory, and no row is missing afterwards."""
    monkeypatch.setattr(follow, "UNREAD", 3)
    async with story() as (orchestrator, one, record):
        orchestrator.know(*range(1, 10))
        for step in range(1, 10):
            await orchestrator.step(step, 1.0 / step)
        await asyncio.sleep(0)
        orchestrator.shown = standing("done", 9)
        monkeypatch.setattr(follow, "ASK_EVERY", 0.01)
        async with asyncio.timeout(10):
            await watch(one, record)
    assert (record.steps, record.end) == (list(range(1, 10)), ("s", 1 / 9))


async def test_reading_goes_on_where_it_was_left() -> None:
    """After a break, with nothing lost and nothing told twice."""
    async with story() as (orchestrator, one, record):
        orchestrator.shown = standing("running", 2)
        for step in (1, 2, 3, 4):
            await orchestrator.step(step, 1.0 / step)
        await orchestrator.state("done", step=4)
        async for news in one.news():
            assert isinstance(news, StepMetrics)
            if news.step == 2:
                break
        await watch(one, record, old=True)
    assert (record.steps, record.end) == ([3, 4], ("s", 0.25))


async def test_a_run_that_was_suspended_and_resumed_unread_is_not_over() -> None:
    """What was heard last counts."""
    async with story() as (orchestrator, one, record):
        await orchestrator.step(1, 1.0)
        await orchestrator.state("suspended", "suspended by request", step=1)
        await orchestrator.state("running", step=1)
        await orchestrator.step(2, 0.5)
        await orchestrator.state("done", step=2)
        await watch(one, record)
    assert (record.steps, record.end, record.other_end) == ([1, 2], ("s", 0.5), None)
