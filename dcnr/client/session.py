"""One training run, as a client sees it.

`async for step in session` gives the row of every step until the run ends; it raises the run's own reason if it failed. `news` gives
everything that is told of it: rows, validations, notes, and the end.

Rule 1: whoever trains hears every row from the first; whoever comes to a run that goes on hears from then on, unless asked otherwise.
Rule 2: sessions belong to the cluster: they go on whoever listens, and several may listen.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from dcnr.bus.api import call
from dcnr.bus.base import Bus
from dcnr.bus.messages import StepMetrics, ValidationMetrics
from dcnr.client.answers import Checkpoint, SessionDetails, SessionState, read
from dcnr.client.follow import AWAY, End, Follower, Log, News, ask_log
from dcnr.errors import BusUnavailable, WorldError
from dcnr.ids import SessionId

ASK_EVERY = 0.1
"""Seconds between two looks at whether a session is suspended."""

Listen = Callable[[SessionId], Awaitable[Follower]]


class Session:
    """A session of a cluster. Made by `Cluster.train` and `Cluster.session`."""

    def __init__(self, bus: Bus, name: SessionId, listen: Listen, follower: Follower | None = None) -> None:
        self.name = name
        self._bus = bus
        self._listen = listen
        self._follower = follower
        self._old = follower is None

    async def __aiter__(self) -> AsyncIterator[StepMetrics]:
        """The row of each step, once and in order, until the run ends. Raises `DcnrError` if it failed."""
        async for one in self.news():
            match one:
                case StepMetrics():
                    yield one
                case End(error=error) if error is not None:
                    raise error
                case _:
                    pass

    async def news(self, first: int | None = None) -> AsyncIterator[News]:
        """Everything that is told, the `End` last. `first`: the step to begin with; those that were done before are looked up.

        A later call goes on where an earlier one was left; after the end it tells whether the run goes on, or the end again.
        """
        if self._follower is None:
            self._follower = await self._listen(self.name)
        old, self._old = self._old, True
        async for one in self._follower.news(first if old else first or 1, old):
            yield one

    async def wait(self) -> End:
        """Until the run ends, and how. Raises `DcnrError` if it failed."""
        async for one in self.news():
            if isinstance(one, End):
                if one.error is not None:
                    raise one.error
                return one
        raise AssertionError("news ends with the end")

    async def show(self) -> SessionDetails:
        """Everything about it, now."""
        return read(SessionDetails, await self._call("session.show"))

    async def log(self, first: int = 1, last: int | None = None, every: int = 1) -> Log:
        """Its training log from step `first` to `last` (None: as far as it is), of which the steps that are multiples of `every`.

        Rolled back rows are not in it: each step is there once. The log keeps the newest 100,000 steps.
        """
        last = (await self.show()).steps if last is None else last
        rows: list[StepMetrics] = []
        validations: dict[int, ValidationMetrics] = {}
        while first <= last:
            part = await ask_log(self._bus, self.name, first, last, every)
            validations |= {one.step: one for one in part.validations}
            ends = [row.step for row in part.rows[-1:]] + [one.step for one in part.validations[-1:]]
            if not ends:
                break
            rows += part.rows
            first = max(ends) + 1
        return Log(rows, [validations[step] for step in sorted(validations)])

    async def checkpoints(self) -> list[Checkpoint]:
        """Its complete checkpoints, oldest first."""
        return [Checkpoint(self.name, step) for step in sorted((await self.show()).checkpoints)]

    async def suspend(self, note: Callable[[str], None] = lambda text: None) -> SessionState:
        """Write a checkpoint and let go of the PNodes; returns when that is done. `note` is told if the orchestrator is away meanwhile."""
        found = read(SessionState, await self._call("session.suspend"))
        away = False
        while found.state == "suspending":
            await asyncio.sleep(ASK_EVERY)
            try:
                found = read(SessionState, await self._call("session.show"))
            except (BusUnavailable, WorldError):  # what was asked is written down: the next orchestrator goes on with it
                if not away:
                    note(AWAY)
                away = True
        return found

    async def resume(self, steps: int | None = None) -> SessionState:
        """Go on from the last checkpoint; `steps` is a new total."""
        more = {} if steps is None else {"steps": steps}
        return read(SessionState, await self._call("session.resume", **more))

    async def rebalance(self) -> SessionState:
        """Divide it anew among the PNodes that there are now, at a checkpoint; no step is lost."""
        return read(SessionState, await self._call("session.rebalance"))

    async def delete(self) -> SessionState:
        """Forget it and its checkpoints."""
        return read(SessionState, await self._call("session.delete"))

    async def _call(self, verb: str, **fields: object) -> dict[str, Any]:
        return await call(self._bus, verb, session=self.name, **fields)
