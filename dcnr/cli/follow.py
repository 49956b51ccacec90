"""Follows a training run: its step rows and changes of state, until it ends.

Rule 1: metrics are at most once. Silence is filled by asking the orchestrator every `ASK_EVERY` seconds, a gap between two steps by asking
it for the rows, at the latest before the end is shown. Each step is shown once, in order.
Rule 2: that nobody answers is not the end: it is told once, and so is that somebody answers again. Only `done`, `failed`, `suspended` and
`deleted` end a run.
Rule 3: what holds a run up or moves it is told in one line, once. Before the first step waiting and deploying are normal, so they are told
only if they last into a silence.
Rule 4: a validation is shown when it is heard of, once; one that is done again after a rollback, and gives the same, is not.
Rule 5: `done` ends well; `failed` is an error with the run's own reason; a suspended and a deleted session end with a note.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from dcnr.bus import subjects
from dcnr.bus.api import call
from dcnr.bus.base import Bus
from dcnr.bus.codec import decode
from dcnr.bus.messages import SessionMetrics, StepMetrics, ValidationMetrics
from dcnr.cli.progress import View
from dcnr.cli.rows import Rows
from dcnr.errors import BusUnavailable, DcnrError, NotFound, PeerError, WorldError
from dcnr.ids import SessionId

ASK_EVERY = 2.0
"""Seconds of silence after which the orchestrator is asked."""
AWAY = "the orchestrator does not answer; waiting for it"
FILL_EVERY = 0.5
"""Seconds between two questions for the same missing rows."""
FILL_TRIES = 10
"""So often; then nobody knows them."""
_ENDS = frozenset({"done", "failed", "suspended", "deleted"})
_TOLD = frozenset({"waiting", "deploying", "adopting", "running"})
_ROWS = TypeAdapter(list[StepMetrics])


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a session stands, and why. `lasts`: it was asked for in a silence."""

    state: str
    reason: str = ""
    step: int = 0
    lasts: bool = False


class Follower:
    """One session's news. Made before the session, so that nothing is missed."""

    def __init__(self, bus: Bus, session: SessionId) -> None:
        self._bus = bus
        self.session = session
        self._news: asyncio.Queue[bytes] = asyncio.Queue()
        self.last_step = 0
        self.final_loss: float | None = None
        self._validated = 0
        """The last step whose validation was shown."""
        self._rows: Rows | None = None
        self._told = Standing("")
        self._away = False
        self._asked_for_rows = 0.0
        self._tries = 0

    def on_message(self, data: bytes) -> None:
        """Bus callback: only enqueues."""
        self._news.put_nowait(data)

    async def follow(self, view: View, old: bool = False) -> None:
        """Show everything until the run ends. An `old` run may have ended, so it is asked for first; what it did before is not shown.

        Raises `DcnrError` if it failed.
        """
        if self._rows is None:
            self._rows = Rows(None if old else 1)
        now = await (self._ask(view) if old else self._next(view))
        while now is None or now.state not in _ENDS:
            if now is not None:
                self._tell(view, now)
            now = await self._next(view)
        await self._catch_up(view, now.step)
        self.last_step = max(self.last_step, now.step)
        if now.state == "done":
            if now.reason:
                view.note(f"session {self.session} {now.reason}")
            view.done(self.session, self.final_loss)
        else:
            self._end(view, now)

    def _end(self, view: View, now: Standing) -> None:
        view.ended(self.session, now.state, self.last_step, now.reason)
        text = f"session {self.session} {'failed' if now.state == 'failed' else f'is {now.state}'} at step {self.last_step}"
        text += f": {now.reason}" if now.reason else ""
        if now.state == "failed":
            raise DcnrError(text, f"`dcnr session show {self.session}` says more")
        view.note(text)

    def _tell(self, view: View, now: Standing) -> None:
        before, started = self._told, self.last_step > 0 or now.lasts
        if now.state not in _TOLD or not started or (now.state, now.reason) == (before.state, before.reason):
            return
        self._told = now
        if now.reason:
            view.note(f"session {self.session} is {now.state}: {now.reason}")
        elif now.state == "running" and before.reason:
            view.note(f"session {self.session} is running again")

    # -- what is heard, and what is asked ----------------------------------------------------------------------------------

    async def _next(self, view: View) -> Standing | None:
        """Show steps until the state is heard of; None if nobody answers."""
        while True:
            try:
                async with asyncio.timeout(ASK_EVERY):
                    data = await self._news.get()
            except TimeoutError:
                return await self._ask(view)
            standing = self._hear(view, data)
            await self._fill(view)
            if standing is not None:
                return standing

    def _hear(self, view: View, data: bytes) -> Standing | None:
        """Show a row, or return a state."""
        try:
            message = decode(data)
        except PeerError as error:
            view.note(f"a metric could not be read: {error}")
            return None
        self._answered(view)
        match message:
            case StepMetrics():
                self._show(view, [message])
            case ValidationMetrics():
                self._show_validation(view, message)
            case SessionMetrics():
                return Standing(message.state, message.reason, message.step)
            case _:
                pass
        return None

    async def _ask(self, view: View) -> Standing | None:
        try:
            shown = await call(self._bus, "session.show", session=self.session)
        except NotFound:
            self._answered(view)
            return Standing("deleted")
        except (BusUnavailable, WorldError):
            self._missed(view)
            return None
        self._answered(view)
        await self._fill(view)
        if shown["state"] == "done" and self.final_loss is None:
            self.final_loss = shown["loss"]
        self.last_step = max(self.last_step, shown["step"])
        return Standing(shown["state"], shown["reason"] or "", shown["step"], lasts=True)

    def _missed(self, view: View) -> None:
        if not self._away:
            self._away = True
            view.note(AWAY)

    def _answered(self, view: View) -> None:
        if self._away:
            self._away = False
            view.note("the orchestrator answers again")

    # -- rows --------------------------------------------------------------------------------------------------------------

    def _show(self, view: View, rows: Iterable[StepMetrics]) -> None:
        assert self._rows is not None
        for row in rows:
            for ready in self._rows.add(row):
                self._show_one(view, ready)

    def _show_one(self, view: View, row: StepMetrics) -> None:
        self.last_step, self.final_loss = row.step, row.loss
        view.step(row)

    def _show_validation(self, view: View, row: ValidationMetrics) -> None:
        if row.step > self._validated:
            self._validated = row.step
            view.validation(row)

    async def _fill(self, view: View, last: int = 0) -> bool:
        """Ask for rows that are missing, up to step `last`, unless that was done a moment ago. Whether none are missing any more."""
        assert self._rows is not None
        now = asyncio.get_running_loop().time()
        if self._rows.gap(last) is None or now < self._asked_for_rows + FILL_EVERY:
            return self._rows.gap(last) is None
        self._asked_for_rows = now
        while (gap := self._rows.gap(last)) is not None:
            try:
                self._show(view, await self._rows_of(*gap))
            except (BusUnavailable, WorldError):
                self._missed(view)
                return False
            if self._rows.gap(last) == gap:
                return self._give_up(view, gap, last)
            self._tries = 0
        return True

    async def _rows_of(self, first: int, last: int) -> list[StepMetrics]:
        try:
            answer = await call(self._bus, "session.rows", session=self.session, first=first, last=last)
            return _ROWS.validate_python(answer.get("rows"))
        except NotFound:
            return []
        except ValidationError as error:
            raise PeerError("the orchestrator's rows are none", "is it of the same version? see: dcnr doctor") from error

    def _give_up(self, view: View, gap: tuple[int, int], last: int) -> bool:
        """The orchestrator does not know these rows, perhaps not yet."""
        self._tries += 1
        if self._tries < FILL_TRIES:
            return False
        self._tries = 0
        assert self._rows is not None
        view.note(f"nobody knows the numbers of step {gap[0]}" + (f" to {gap[1]}" if gap[1] > gap[0] else ""))
        for row in self._rows.skip(last):
            self._show_one(view, row)
        return self._rows.gap(last) is None

    async def _catch_up(self, view: View, last: int) -> None:
        """Before the end: show what was heard, and ask for what was not."""
        while not self._news.empty():
            self._hear(view, self._news.get_nowait())
        for _ in range(FILL_TRIES):
            if await self._fill(view, last):
                return
            await asyncio.sleep(FILL_EVERY)
        assert self._rows is not None
        while (gap := self._rows.gap(last)) is not None:
            self._tries = FILL_TRIES
            self._give_up(view, gap, last)


@asynccontextmanager
async def follower(bus: Bus, session: SessionId) -> AsyncIterator[Follower]:
    """A follower that hears the session's metrics while the block runs."""
    one = Follower(bus, session)
    kinds: tuple[subjects.MetricKind, ...] = ("step", "validation", "session")
    heard = [await bus.subscribe(subjects.metrics(kind, session), one.on_message) for kind in kinds]
    try:
        yield one
    finally:
        for subscription in heard:
            await subscription.stop()
