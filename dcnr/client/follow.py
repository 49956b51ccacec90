"""Follows a training run: its step rows, validations and changes of state, until it ends.

Rule 1: metrics are at most once. Silence is filled by asking the orchestrator every `ASK_EVERY` seconds, a gap between two steps by asking
it for the rows, at the latest before the end is told. Each step is told once, in order, whatever was rolled back; each validation at most
once: one whose message is lost is found only beside a gap of steps, and in the log.
Rule 2: that nobody answers is not the end: it is told once, and so is that somebody answers again. Only `done`, `failed`, `suspended` and
`deleted` end a run.
Rule 3: what holds a run up or moves it is told in one note, once. Before the first step waiting and deploying are normal, so they are told
only if they last into a silence.
Rule 4: what is heard while nobody reads is kept up to `UNREAD` messages; more of them count as lost (rule 1).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from dcnr.bus import subjects
from dcnr.bus.api import call
from dcnr.bus.base import Bus
from dcnr.bus.codec import decode
from dcnr.bus.messages import SessionMetrics, StepMetrics, ValidationMetrics
from dcnr.client.answers import OTHER_VERSION
from dcnr.client.rows import Rows, Validations
from dcnr.errors import BusUnavailable, DcnrError, NotFound, PeerError, WorldError
from dcnr.ids import SessionId

ASK_EVERY = 2.0
"""Seconds of silence after which the orchestrator is asked."""
AWAY = "the orchestrator does not answer; waiting for it"
FILL_EVERY = 0.5
"""Seconds between two questions for the same missing rows."""
FILL_TRIES = 10
"""So often; then nobody knows them."""
UNREAD = 10_000
_ENDS = frozenset({"done", "failed", "suspended", "deleted"})
_TOLD = frozenset({"waiting", "deploying", "adopting", "running"})


@dataclass(frozen=True, slots=True)
class Log:
    """Rows of a session's training log, as the orchestrator answers."""

    rows: list[StepMetrics]
    validations: list[ValidationMetrics]


_LOG = TypeAdapter(Log)


@dataclass(frozen=True, slots=True)
class Note:
    """Something that a person wants to know: what holds a run up, or what could not be learned of it."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """A run is over for now. `state` is done, failed, suspended or deleted, `reason` says why in words, if there is more to say.

    `step`: the last one done. `loss`: of the last one known.
    """

    session: SessionId
    state: str
    step: int
    loss: float | None
    reason: str = ""

    def __str__(self) -> str:
        text = f"session {self.session} {'failed' if self.state == 'failed' else f'is {self.state}'} at step {self.step}"
        return text + (f": {self.reason}" if self.reason else "")

    @property
    def error(self) -> DcnrError | None:
        """What a run that failed failed of."""
        return DcnrError(str(self), f"`dcnr session show {self.session}` says more") if self.state == "failed" else None


News = StepMetrics | ValidationMetrics | Note | End


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
        self._heard: asyncio.Queue[bytes] = asyncio.Queue(UNREAD)
        self._news: deque[News] = deque()
        self._last_step = 0
        self._final_loss: float | None = None
        self._rows: Rows | None = None
        self._validations = Validations()
        self._told = Standing("")
        self._away = False
        self._asked_for_rows = 0.0
        self._tries = 0

    def on_message(self, data: bytes) -> None:
        """Bus callback: only enqueues."""
        if not self._heard.full():
            self._heard.put_nowait(data)

    async def news(self, first: int | None = 1, old: bool = False) -> AsyncIterator[News]:
        """Everything from step `first` on (None: from now on) until the run ends; the last is the `End`.

        An `old` run may have ended, so it is asked for first. A later call goes on where an earlier one was left.
        """
        if self._rows is None:
            self._rows = Rows(first)
        now = await self._ask() if old else None
        while True:
            while self._news:
                yield self._news.popleft()
            if now is not None and now.state in _ENDS and (now := self._newest(now)).state in _ENDS:
                break
            if now is not None:
                self._tell(now)
            now = await self._next()
        await self._catch_up(now.step)
        while self._news:
            yield self._news.popleft()
        self._last_step = max(self._last_step, now.step)
        yield End(self.session, now.state, self._last_step, self._final_loss, now.reason)

    def _note(self, text: str) -> None:
        self._news.append(Note(text))

    def _tell(self, now: Standing) -> None:
        before, started = self._told, self._last_step > 0 or now.lasts
        if now.state not in _TOLD or not started or (now.state, now.reason) == (before.state, before.reason):
            return
        self._told = now
        if now.reason:
            self._note(f"session {self.session} is {now.state}: {now.reason}")
        elif now.state == "running" and before.reason:
            self._note(f"session {self.session} is running again")

    # -- what is heard, and what is asked ----------------------------------------------------------------------------------

    async def _next(self) -> Standing | None:
        """Take one message, or ask in a silence; the state, if that was what was said."""
        if self._news:
            return None
        try:
            async with asyncio.timeout(ASK_EVERY):
                data = await self._heard.get()
        except TimeoutError:
            return await self._ask()
        standing = self._hear(data)
        await self._fill()
        return standing

    def _newest(self, now: Standing) -> Standing:
        """Where it stands after all that was heard: what was suspended may have been resumed before anybody read of it."""
        while not self._heard.empty():
            now = self._hear(self._heard.get_nowait()) or now
        return now

    def _hear(self, data: bytes) -> Standing | None:
        """Take a row, or return a state."""
        try:
            message = decode(data)
        except PeerError as error:
            self._note(f"a metric could not be read: {error}")
            return None
        self._answered()
        match message:
            case StepMetrics():
                self._add([message])
            case ValidationMetrics():
                self._validate([message])
            case SessionMetrics():
                return Standing(message.state, message.reason, message.step)
            case _:
                pass
        return None

    async def _ask(self) -> Standing | None:
        """Where the session stands; None if nobody answers."""
        try:
            shown = await call(self._bus, "session.show", session=self.session)
        except NotFound:
            self._answered()
            return Standing("deleted")
        except (BusUnavailable, WorldError):
            self._missed()
            return None
        self._answered()
        await self._fill()
        if shown["state"] == "done" and self._final_loss is None:
            self._final_loss = shown["loss"]
        self._last_step = max(self._last_step, shown["step"])
        return Standing(shown["state"], shown["reason"] or "", shown["step"], lasts=True)

    def _missed(self) -> None:
        if not self._away:
            self._away = True
            self._note(AWAY)

    def _answered(self) -> None:
        if self._away:
            self._away = False
            self._note("the orchestrator answers again")

    # -- rows --------------------------------------------------------------------------------------------------------------

    def _add(self, rows: Iterable[StepMetrics]) -> None:
        assert self._rows is not None
        for row in rows:
            self._pass_on(self._rows.add(row))

    def _validate(self, found: Iterable[ValidationMetrics]) -> None:
        """A validation is told after the row of its step."""
        assert self._rows is not None
        for one in found:
            self._news.extend(self._validations.add(one, self._rows.reached))

    def _pass_on(self, rows: Iterable[StepMetrics]) -> None:
        for row in rows:
            self._news.extend(self._validations.due(row.step - 1))
            self._last_step, self._final_loss = row.step, row.loss
            self._news.append(row)
            self._news.extend(self._validations.due(row.step))

    async def _fill(self, last: int = 0) -> bool:
        """Ask for rows that are missing, up to step `last`, unless that was done a moment ago. Whether none are missing any more."""
        assert self._rows is not None
        now = asyncio.get_running_loop().time()
        if self._rows.gap(last) is None or now < self._asked_for_rows + FILL_EVERY:
            return self._rows.gap(last) is None
        self._asked_for_rows = now
        while (gap := self._rows.gap(last)) is not None:
            try:
                log = await ask_log(self._bus, self.session, *gap)
            except (BusUnavailable, WorldError):
                self._missed()
                return False
            self._validate(log.validations)
            self._add(log.rows)
            if self._rows.gap(last) == gap:
                return self._give_up(gap, last)
            self._tries = 0
        return True

    def _give_up(self, gap: tuple[int, int], last: int) -> bool:
        """The orchestrator does not know these rows, perhaps not yet."""
        self._tries += 1
        if self._tries < FILL_TRIES:
            return False
        self._tries = 0
        assert self._rows is not None
        self._note(f"nobody knows the numbers of step {gap[0]}" + (f" to {gap[1]}" if gap[1] > gap[0] else ""))
        self._pass_on(self._rows.skip(last))
        return self._rows.gap(last) is None

    async def _catch_up(self, last: int) -> None:
        """Before the end: ask for what was not heard."""
        for _ in range(FILL_TRIES):
            if await self._fill(last):
                break
            await asyncio.sleep(FILL_EVERY)
        assert self._rows is not None
        while (gap := self._rows.gap(last)) is not None:
            self._tries = FILL_TRIES
            self._give_up(gap, last)
        self._news.extend(self._validations.due(last))


async def ask_log(bus: Bus, session: SessionId, first: int, last: int, every: int = 1) -> Log:
    """The log of steps `first` to `last`, as much as one answer holds; of steps that are multiples of `every`. Empty without a session."""
    more = {} if every == 1 else {"every": every}
    try:
        answer = await call(bus, "session.rows", session=session, first=first, last=last, **more)
        return _LOG.validate_python({"validations": [], **answer})
    except NotFound:
        return Log([], [])
    except ValidationError as error:
        raise PeerError("the orchestrator's rows are none", OTHER_VERSION) from error


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
