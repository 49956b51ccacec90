"""A process in the simulated world: it can be killed at any moment, stopped for a while, and slowed.

Rule 1: what a process has asked for happens only while it lives; while it is stopped, it waits, in order, until it goes on.
Rule 2: its inbox follows `dcnr.machine.drive`: a deadline that has passed goes before the next event, one event at a time.
Rule 3: a kill in the middle of an event's commands leaves the rest of them undone; a stop holds them back.
Rule 4: its clock is its own: it differs from all others by a fixed amount, and goes on while the process is stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any, Generic, TypeVar

from dcnr.machine import Machine
from tests.simulation.scheduler import Action, Scheduler

ROUNDING = 1e-9
"""Seconds by which adding up may miss a deadline."""

E = TypeVar("E")
C = TypeVar("C")


WEIGHED_EVERY = 50
"""Events."""
MOST = 1000
"""Things that a machine may remember."""
OURS = ("dcnr.agents.", "dcnr.orchestrator.")
ONE = ("Plan", "Graph", "Routes", "SegmentRoutes")
"""Classes that count as one thing: they do not change."""
INNER = ("beat", "report", "message", "hop", "hosted", "command", "record", "metric", "decision", "info")
SHOWN = (
    "pnode", "session", "epoch", "step", "micro", "attempt", "phase", "segment", "targets", "state", "reason", "busy", "work", "save",
    "skip", "incarnation", "stopping", "subject", "to", "steps", "checkpoint", "damaged", "world",
)  # fmt: skip


def brief(thing: object) -> str:
    """An event or command in a line, without its tensors."""
    if isinstance(thing, tuple):
        return ", ".join(map(brief, thing))
    inner = [brief(getattr(thing, name)) for name in INNER if hasattr(thing, name)]
    shown = [f"{name}={getattr(thing, name)}" for name in SHOWN if hasattr(thing, name)]
    return f"{type(thing).__name__}({' '.join([*shown, *inner])})"[:400]


def weigh(machine: object) -> int:
    """How many things a machine remembers."""
    total, line, seen = 0, deque([machine]), set()
    while line:
        thing = line.pop()
        total += 1
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Mapping):
            line.extend(thing.values())
        elif isinstance(thing, list | tuple | set | frozenset | deque):
            line.extend(thing)
        elif type(thing).__module__.startswith(OURS) and type(thing).__name__ not in ONE:
            names = getattr(type(thing), "__slots__", None) or vars(thing)
            line.extend(getattr(thing, name) for name in names)
    return total


class Process(Generic[E, C]):
    """One process around one machine, which is set by whoever starts it."""

    machine: Machine[E, C]

    def __init__(self, name: str, scheduler: Scheduler, rng: Random) -> None:
        self.name = name
        self.alive = True
        self.stopped = False
        self.slow = 1.0
        """All its work takes this much longer."""
        self.rng = rng
        self.scheduler = scheduler
        self._skew = rng.uniform(0.0, 1000.0)
        self._held: list[Action] = []
        self._forgets = False
        self.handled = 0
        """Events so far."""
        self.trace: Callable[..., None] | None = None
        self._armed: float | None = None

    @property
    def now(self) -> float:
        """Its own clock."""
        return self.scheduler.now + self._skew

    def after(self, delay: float, action: Action) -> None:
        """Do `action` in `delay` seconds, if it still lives."""
        self.scheduler.after(delay, lambda: self._do(action))

    def work(self, least: float, most: float, action: Action) -> None:
        """Do `action` after work of `least` to `most` seconds."""
        self.after(self.rng.uniform(least, most) * self.slow, action)

    def kill(self) -> None:
        """It is gone, with all that it knew."""
        self.alive = False
        self._held.clear()

    def stop(self, forget: bool) -> None:
        """As SIGSTOP. What comes in meanwhile waits, or is lost if the server does not keep so much (`forget`)."""
        self.stopped = True
        self._forgets = forget

    def go_on(self) -> None:
        """As SIGCONT."""
        if not self.stopped or not self.alive:
            return
        self.stopped = False
        held, self._held = self._held, []
        for action in held:
            self._do(action)

    def hear(self, action: Action) -> None:
        """Something came from outside."""
        if not (self.stopped and self._forgets):
            self._do(action)

    def put(self, event: E) -> None:
        """Into the inbox, which is empty: events are worked off as they come."""
        self._tick_if_due()
        self._handle(event, self.now)
        self._arm()

    def tick(self) -> E:
        """The event for a passed deadline."""
        raise NotImplementedError

    def perform(self, command: C) -> None:
        """Do what the machine decided."""
        raise NotImplementedError

    def _do(self, action: Action) -> None:
        if not self.alive:
            return
        if self.stopped:
            self._held.append(action)
        else:
            action()

    def _handle(self, event: E, now: float) -> None:
        if not self.alive:
            return
        commands = self.machine.handle(event, now)
        self.machine.validate()
        self._check_growth()
        if self.trace is not None:
            self.trace(self.name, "<-", brief(event), *("\n               -> " + brief(command) for command in commands))
        for command in commands:
            self._do(partial(self.perform, command))

    def _check_growth(self) -> None:
        """Whatever goes wrong, a machine remembers a bounded number of things. Looked at now and then, since counting takes time."""
        self.handled += 1
        if self.handled % WEIGHED_EVERY == 0:
            things = weigh(self.machine)
            if things > MOST:
                raise AssertionError(f"{self.name} remembers {things} things")

    def _tick_if_due(self) -> None:
        due = self.machine.deadline()
        if due is not None and due <= self.now + ROUNDING:
            self._handle(self.tick(), max(due, self.now))

    def _arm(self) -> None:
        due = self.machine.deadline() if self.alive else None
        if due is None or due == self._armed:
            return
        self._armed = due
        self.after(max(0.0, due - self.now), lambda: self._wake(due))

    def _wake(self, due: float) -> None:
        if self._armed != due:
            return
        self._armed = None
        self._tick_if_due()
        self._arm()


class OwnClock:
    """A process's own clock, as `dcnr.clock.Clock`."""

    def __init__(self, process: Process[Any, Any]) -> None:
        self._process = process

    def now(self) -> float:
        """Seconds since some moment of its own."""
        return self._process.now


AnyProcess = Process[Any, Any]
