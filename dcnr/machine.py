"""Machines decide, shells act.

Rule 1: a machine is plain synchronous code. It gets an event and the time, changes its own state and
returns commands. It never waits, reads a clock, draws a random number or touches I/O.
Rule 2: slow work is a command whose result comes back as an event.
Rule 3: `drive` is the only loop; a shell gives it an inbox and a function that performs commands.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from dcnr.clock import Clock

EventT = TypeVar("EventT", contravariant=True)
CommandT = TypeVar("CommandT")
E = TypeVar("E")
C = TypeVar("C")


class Machine(Protocol[EventT, CommandT]):
    """Events in, commands out."""

    def handle(self, event: EventT, now: float) -> list[CommandT]:
        """Take one event at time `now` (seconds) and return what must be done, in order."""
        ...

    def deadline(self) -> float | None:
        """When the machine wants a `Tick` even if nothing happens; None for never."""
        ...

    def validate(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        ...


async def drive(
    machine: Machine[E, C],
    inbox: asyncio.Queue[E],
    perform: Callable[[C], None],
    clock: Clock,
    tick: Callable[[], E],
    story: deque[E] | None = None,
) -> None:
    """Feed `machine` from `inbox` until cancelled; `tick()` makes the event for a passed deadline.

    `perform` must not block: it starts slow work, whose result it puts into `inbox`.
    `story` (a bounded deque) keeps the last events for the report of a crash.
    """
    while True:
        event = await _next_event(machine, inbox, clock, tick)
        if story is not None:
            story.append(event)
        for command in machine.handle(event, clock.now()):
            perform(command)


async def _next_event(machine: Machine[E, C], inbox: asyncio.Queue[E], clock: Clock, tick: Callable[[], E]) -> E:
    due = machine.deadline()
    if due is not None and due <= clock.now():
        return tick()
    if not inbox.empty():
        return inbox.get_nowait()
    if due is None:
        return await inbox.get()
    try:
        async with asyncio.timeout(max(0.0, due - clock.now())):
            return await inbox.get()
    except TimeoutError:
        return tick()
