"""`drive` feeds a machine its events in order, ticks it at its deadline, and keeps the story."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import pytest

from dcnr.clock import ManualClock, MonotonicClock
from dcnr.machine import drive

TICK = "tick"


class Recorder:
    """A machine that answers each event with one command, and wants one tick at `due`."""

    def __init__(self, due: float | None = None) -> None:
        self.due = due
        self.heard: list[tuple[str, float]] = []

    def handle(self, event: str, now: float) -> list[str]:
        """One command for each event, none for a tick."""
        self.heard.append((event, now))
        if event == TICK:
            self.due = None
            return []
        return [f"did {event}"]

    def deadline(self) -> float | None:
        """As it was told."""
        return self.due

    def validate(self) -> None:
        """Nothing can contradict itself."""


async def run_until(
    machine: Recorder, inbox: asyncio.Queue[str], enough: Callable[[], bool], clock: ManualClock | MonotonicClock
) -> list[str]:
    """Commands that were performed until `enough`; the story's events are those that were heard."""
    performed: list[str] = []
    story: deque[str] = deque(maxlen=10)
    task = asyncio.ensure_future(drive(machine, inbox, performed.append, clock, lambda: TICK, story))
    async with asyncio.timeout(10):
        while not enough():
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(story) == [event for event, _ in machine.heard]
    return performed


async def test_events_are_handled_in_order() -> None:
    """Each with the clock's time, and its commands performed before the next."""
    machine, inbox = Recorder(), asyncio.Queue[str]()
    for event in ("a", "b", "c"):
        inbox.put_nowait(event)
    performed = await run_until(machine, inbox, lambda: len(machine.heard) == 3, ManualClock(7.0))
    assert machine.heard == [("a", 7.0), ("b", 7.0), ("c", 7.0)]
    assert performed == ["did a", "did b", "did c"]


async def test_a_passed_deadline_goes_before_waiting_events() -> None:
    """A busy inbox cannot starve a time-out."""
    machine, inbox = Recorder(due=3.0), asyncio.Queue[str]()
    inbox.put_nowait("a")
    await run_until(machine, inbox, lambda: len(machine.heard) == 2, ManualClock(4.0))
    assert [event for event, _ in machine.heard] == [TICK, "a"]


async def test_a_deadline_ticks_though_nothing_happens() -> None:
    """In real time, and not before it is due."""
    clock = MonotonicClock()
    due = clock.now() + 0.05
    machine = Recorder(due)
    await run_until(machine, asyncio.Queue(), lambda: bool(machine.heard), clock)
    [(event, when)] = machine.heard
    assert event == TICK
    assert when >= due
