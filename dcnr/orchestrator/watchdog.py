"""Finds out when a deployment stands still, from what its PNodes say in their heartbeats. No time limit has to be set for it.

Rule 1: a step or a validation is under way, nobody has anything to do, no job was done and nothing new was heard for 1.25 s: a message was
lost, and it is fed again. The patience doubles each time; the fifth time, after 20 s, the deployment is given up.
Rule 2: a PNode that has work, or has not answered its deploy, and does no job for 45 s, or ten times as long as it ever took in this
deployment, is stuck. Before the first step is done, compiling and loading may take 300 s.
Rule 3: a PNode that is there and does not host the session for 10 s has forgotten it.
Rule 4: after a time in which the orchestrator itself could not hear, everything counts from anew.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dcnr.bus.messages import Hosted
from dcnr.errors import InvariantError
from dcnr.ids import PNodeId

PATIENCE = 1.25
"""Seconds of standstill: more than two heartbeats."""
TRIES = 5
"""How often a step may stand still."""
STUCK_AFTER = 45.0
STUCK_FACTOR = 10.0
"""Times the longest a PNode ever took for a job."""
STUCK_AT_FIRST = 300.0
ABSENT_AFTER = 10.0


@dataclass(frozen=True, slots=True)
class Again:
    """Feed what is under way again."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Deploy anew, `without` a PNode if it is one that is to blame; `work` is what it had done."""

    reason: str
    without: PNodeId | None = None
    work: int = 0


Verdict = Again | GiveUp


@dataclass(frozen=True, slots=True)
class Sight:
    """What the orchestrator itself knows: steps done, what it has fed and heard so far, and who owes it the answer to a deploy.

    `answered`: micro-batches of validations that have come through.
    """

    done: int
    news: int
    under_way: bool
    owing: Collection[PNodeId] = ()
    answered: int = 0
    validation: bool = False
    """Whether that is what is under way."""


@dataclass(slots=True)
class Seen:
    """A PNode: when it was last heard to host us, when it last did a job, and since when it has work."""

    heard: float
    grown: float
    busy_since: float
    work: int = -1
    busy: bool = False


class Watchdog:
    """Of the deployment on `hosts` that begins `now`, after step `start`."""

    def __init__(self, hosts: Collection[PNodeId], start: int, now: float) -> None:
        self._seen = {pnode: Seen(now, now, now) for pnode in sorted(hosts)}
        self._start = start
        self._sight = Sight(start, 0, False)
        self._quiet_since = now
        self._tries = 0
        self._longest = 0.0

    def heard(self, pnode: PNodeId, hosted: Hosted, now: float) -> None:
        """A heartbeat lists the deployment."""
        seen = self._seen[pnode]
        seen.heard = now
        grown = hosted.work != seen.work
        if grown or hosted.busy:
            self._quiet_since = now
        if grown and seen.busy:
            self._longest = max(self._longest, now - max(seen.grown, seen.busy_since))
        if grown:
            seen.grown = now
        if hosted.busy and not seen.busy:
            seen.busy_since = now
        seen.work, seen.busy = hosted.work, hosted.busy

    def verdict(self, sight: Sight, now: float) -> Verdict | None:
        """What must be done now, if anything."""
        self._look(sight, now)
        due = [verdict for when, verdict in self._expected() if when <= now]
        if due and isinstance(due[0], Again):
            self._tries += 1
            self._quiet_since = now
        return due[0] if due else None

    def deadline(self) -> float:
        """When there will be a verdict if nothing is heard."""
        return min(when for when, _ in self._expected())

    def forgive(self, now: float) -> None:
        """We could not hear until now."""
        self._quiet_since = now
        for seen in self._seen.values():
            seen.heard = seen.grown = seen.busy_since = now

    def validate(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        if not 0 <= self._tries < TRIES or not self._seen:
            raise InvariantError(f"{self._tries} tries of a step on {len(self._seen)} PNodes")

    def _look(self, sight: Sight, now: float) -> None:
        if sight.news != self._sight.news or sight.under_way != self._sight.under_way:
            self._quiet_since = now
        if (sight.done, sight.answered) != (self._sight.done, self._sight.answered):
            self._tries = 0
        self._sight = sight

    def _expected(self) -> list[tuple[float, Verdict]]:
        """Every verdict that stands as things are, and when; those about one PNode first."""
        expected: list[tuple[float, Verdict]] = []
        stepped = self._sight.done > self._start
        limit = max(STUCK_AFTER, STUCK_FACTOR * self._longest) if stepped else STUCK_AT_FIRST
        for pnode, seen in self._seen.items():
            absent = f"PNode {pnode} is there, but has not hosted the session for {ABSENT_AFTER:.0f} s"
            expected.append((seen.heard + ABSENT_AFTER, GiveUp(absent, pnode, seen.work)))
            if seen.busy or pnode in self._sight.owing:
                stuck = f"PNode {pnode} has work and did none of it for {limit:.0f} s"
                since = max(seen.grown, seen.busy_since) if seen.busy else seen.grown
                expected.append((since + limit, GiveUp(stuck, pnode, seen.work)))
        if self._sight.under_way and all(not seen.busy and seen.heard > self._quiet_since for seen in self._seen.values()):
            expected.append((self._quiet_since + PATIENCE * 2**self._tries, self._standstill()))
        return expected

    def _standstill(self) -> Verdict:
        if self._tries + 1 < TRIES:
            return Again()
        what = f"the validation of step {self._sight.done}" if self._sight.validation else f"step {self._sight.done + 1}"
        return GiveUp(f"{what} stood still {TRIES} times")
