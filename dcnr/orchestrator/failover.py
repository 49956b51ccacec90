"""What a new leader makes of a deployment that it finds: where it stands, by the word of its PNodes.

Rule 1: it is adopted when every PNode of the stored assignment says that it holds the session in the stored epoch.
Rule 2: it cannot be, when one says another epoch, or has not been heard of for 3 s that we could hear.
Rule 3: the newest decision that a PNode knows is the last one that was taken; all others are at most one step behind it, since a step is
decided only when all have reported it. Where no step was decided in this epoch, it stands where it was deployed.
Rule 4: it goes on with an attempt that no PNode has heard of.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcnr.bus.messages import Decision, Hosted, PNodeInfo
from dcnr.errors import InvariantError
from dcnr.ids import PNodeId
from dcnr.orchestrator.state import AssignmentRecord

HEARD_WITHIN = 3.0
"""Seconds in which every PNode must say that it is there."""


@dataclass(frozen=True, slots=True)
class Found:
    """How a deployment goes on: after the decision `last`, or, if that is None, after its deploy."""

    peers: tuple[PNodeInfo, ...]
    last: Decision | None
    attempt: int


class Adoption:
    """The deployment `assignment`, looked for since `now`."""

    def __init__(self, assignment: AssignmentRecord, now: float) -> None:
        self.assignment = assignment
        self.hosts = frozenset(assignment.nodes.values())
        self._until = now + HEARD_WITHIN
        self._heard: dict[PNodeId, tuple[PNodeInfo, Hosted]] = {}

    def heard(self, info: PNodeInfo, hosted: Hosted) -> Found | str | None:
        """A PNode of it says where it stands. Returns how the deployment goes on, or why it cannot; None while others are to be heard."""
        epoch = self.assignment.epoch
        if hosted.epoch != epoch:
            return f"PNode {info.pnode} holds it in epoch {hosted.epoch}, not in {epoch}"
        self._heard[info.pnode] = (info, hosted)
        return self._found() if self._heard.keys() == self.hosts else None

    def missing(self, now: float) -> str | None:
        """Why it cannot be adopted any more, if so."""
        if now < self._until:
            return None
        silent = ", ".join(sorted(self.hosts - self._heard.keys()))
        return f"PNode {silent} did not say within {HEARD_WITHIN:.0f} s that it still holds the session"

    def deadline(self) -> float:
        """When whoever was not heard is missing."""
        return self._until

    def forgive(self, now: float) -> None:
        """We could not hear until now."""
        self._until = now + HEARD_WITHIN

    def validate(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        if not self._heard.keys() < self.hosts:
            raise InvariantError(f"session {self.assignment.session} was found, and is still looked for")

    def _found(self) -> Found | str:
        hosted = [hosted for _, hosted in self._heard.values()]
        steps = {one.step for one in hosted}
        newest = max(steps)
        last = next((one.last for one in hosted if one.last is not None and one.last.step == newest), None)
        apart = f"its PNodes stand at the steps {', '.join(map(str, sorted(steps)))}, and the last decision is not known"
        if min(steps) < max(self.assignment.step, newest - 1) or (last is None and newest > self.assignment.step):
            return apart
        peers = tuple(info for _, (info, _) in sorted(self._heard.items()))
        return Found(peers, last, max(one.attempt for one in hosted) + 1)
