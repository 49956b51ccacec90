"""Follows a training run: its step rows and changes of state, until it ends.

Rule 1: metrics are at most once, so silence is filled by asking the orchestrator every `ASK_EVERY` seconds.
Rule 2: waiting for PNodes is normal for a moment, so it is told only if it lasts into such a silence, once for each reason.
Rule 3: `done` ends well; `failed`, and `suspended` by a fault, are errors with the run's own reason; `suspended` by request and a deleted
session end with a note.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from dcnr.bus import subjects
from dcnr.bus.api import call
from dcnr.bus.base import Bus
from dcnr.bus.codec import decode
from dcnr.bus.messages import Message, SessionMetrics, StepMetrics
from dcnr.cli.progress import View
from dcnr.errors import DcnrError, NotFound
from dcnr.ids import SessionId

ASK_EVERY = 2.0
"""Seconds of silence after which the orchestrator is asked."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a session stands, and why. `fault`: it was suspended, and nobody had asked for that."""

    state: str
    reason: str = ""
    fault: bool = False


class Follower:
    """One session's news. Made before the session, so that nothing is missed."""

    def __init__(self, bus: Bus, session: SessionId) -> None:
        self._bus = bus
        self.session = session
        self._news: asyncio.Queue[Message] = asyncio.Queue()
        self.last_step = 0
        self.final_loss: float | None = None
        self._told = ""

    def on_message(self, data: bytes) -> None:
        """Bus callback: only enqueues."""
        self._news.put_nowait(decode(data))

    async def follow(self, view: View, old: bool = False) -> None:
        """Show everything until the run ends. An `old` run may have ended, so it is asked for first.

        Raises `DcnrError` if it failed, or was suspended by a fault.
        """
        now = await (self._ask() if old else self._next(view))
        while True:
            match now.state:
                case "done":
                    view.done(self.session, self.final_loss)
                    return
                case "failed" | "suspended" | "deleted":
                    self._end(view, now)
                    return
                case _:
                    self._tell(view, now)
            now = await self._next(view)

    def _end(self, view: View, now: Standing) -> None:
        view.ended(self.session, now.state, self.last_step, now.reason)
        text = f"session {self.session} {'failed' if now.state == 'failed' else f'is {now.state}'} at step {self.last_step}"
        text += f": {now.reason}" if now.reason else ""
        if now.state == "failed":
            raise DcnrError(text, f"`dcnr session show {self.session}` says more")
        if now.fault:
            raise DcnrError(text, f"go on with `dcnr session resume {self.session}`")
        view.note(text)

    async def _next(self, view: View) -> Standing:
        """Show steps until the state is heard of."""
        while True:
            try:
                async with asyncio.timeout(ASK_EVERY):
                    message = await self._news.get()
            except TimeoutError:
                return await self._ask()
            match message:
                case StepMetrics():
                    self.last_step, self.final_loss = message.step, message.loss
                    view.step(message)
                case SessionMetrics(state=state) if state != "waiting":
                    return Standing(state, message.reason, message.fault)
                case _:
                    continue

    async def _ask(self) -> Standing:
        try:
            shown = await call(self._bus, "session.show", session=self.session)
        except NotFound:
            return Standing("deleted")
        if shown["state"] == "done" and self.final_loss is None:
            self.final_loss = shown["loss"]
        self.last_step = max(self.last_step, shown["step"])
        return Standing(shown["state"], shown["reason"] or "", shown["fault"])

    def _tell(self, view: View, now: Standing) -> None:
        text = f"session {self.session} is {now.state}" + (f": {now.reason}" if now.reason else "")
        if now.state == "waiting" and text != self._told:
            self._told = text
            view.note(text)


@asynccontextmanager
async def follower(bus: Bus, session: SessionId) -> AsyncIterator[Follower]:
    """A follower that hears the session's metrics while the block runs."""
    one = Follower(bus, session)
    steps = await bus.subscribe(subjects.metrics("step", session), one.on_message)
    states = await bus.subscribe(subjects.metrics("session", session), one.on_message)
    try:
        yield one
    finally:
        await steps.stop()
        await states.stop()
