"""All checkpoints that are read, by the name under which PNodes know them.

Rule 1: a checkpoint is read once, however many requests there are. When it has ended, its newest epoch is remembered.
Rule 2: what waits is offered the fleet as waiting sessions are, after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dcnr.bus.messages import PNodeInfo
from dcnr.ids import NEVER, Epoch, PNodeId, SessionId
from dcnr.orchestrator.commands import Command
from dcnr.orchestrator.events import Generate, MakeRoom, Offered
from dcnr.orchestrator.reading import Reading, ReadingState, Request
from dcnr.orchestrator.session import Settings

Offer = Callable[[SessionId], Sequence[PNodeInfo]]
"""The fleet, as it is free for whoever has this name."""


class Readings:
    """`offer` is asked whenever one of them waits to be placed."""

    def __init__(self, settings: Settings, offer: Offer) -> None:
        self.all: dict[SessionId, Reading] = {}
        self._settings = settings
        self._offer = offer

    @property
    def waiting(self) -> bool:
        """Whether one of them waits to be placed."""
        return any(reading.wants for reading in self.all.values())

    def find(self, request: str) -> tuple[Reading, Request] | None:
        """The request of that id."""
        found = ((reading, reading.requests[request]) for reading in self.all.values() if request in reading.requests)
        return next(found, None)

    def steps_of(self, session: SessionId) -> frozenset[int]:
        """The checkpoints of `session` that are being read: what has to be deployed again must still be there."""
        return frozenset(reading.source.step for reading in self.all.values() if reading.source.session == session)

    def uses(self, name: SessionId, pnode: PNodeId, epoch: Epoch) -> bool:
        """Whether `pnode` rightly hosts a part of the reading `name` in `epoch`."""
        return name in self.all and self.all[name].uses(pnode, epoch)

    def generate(self, ask: Generate, known: Epoch, now: float) -> list[Command]:
        """Take a request. `known`: the newest epoch that PNodes know of its source."""
        name = ask.source.name
        if name not in self.all:
            self.all[name] = Reading(ask.source, self._settings, known, now)
        return self.all[name].handle(ask, now)

    def place(self, now: float) -> list[Command]:
        """Offer the fleet to those that wait."""
        waiting = [(name, reading) for name, reading in self.all.items() if reading.wants]
        return [command for name, reading in waiting for command in reading.handle(Offered(tuple(self._offer(name))), now)]

    def make_room(self, now: float) -> list[Command]:
        """Those that nobody wants anything of let go of what they hold."""
        return [command for reading in self.all.values() for command in reading.handle(MakeRoom(), now)]

    def over(self) -> dict[SessionId, Epoch]:
        """Forget those that have ended: their newest epochs."""
        ended = {name: reading.newest_epoch for name, reading in self.all.items() if reading.state is ReadingState.ENDED}
        for name in ended:
            del self.all[name]
        return ended

    def deadline(self) -> float | None:
        """The earliest of all."""
        return min((due for reading in self.all.values() if (due := reading.deadline()) is not None), default=None)

    def heard(self, name: SessionId, epoch: Epoch) -> None:
        """A PNode knows of this epoch."""
        reading = self.all[name]
        reading.newest_epoch = Epoch(max(reading.newest_epoch, epoch, NEVER))
