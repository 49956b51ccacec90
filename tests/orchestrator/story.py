"""A session and all that surrounds it, for tests: PNodes that follow the protocol answer what it commands, and beat while time passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from dcnr.bus.messages import Complete, Decision, PNodeInfo, SessionMetrics, StepMetrics, ValidationMetrics
from dcnr.ids import Epoch, PNodeId
from dcnr.orchestrator.commands import Command, Measured, Publish, ReadBatch, ReadWindows, SendHop, WriteManifest
from dcnr.orchestrator.events import (
    BatchRead,
    ManifestWritten,
    Offered,
    SessionEvent,
    Standing,
    StartSession,
    SuspendSession,
    Tick,
    WindowsRead,
)
from dcnr.orchestrator.session import Session, Settings
from dcnr.orchestrator.state import CheckpointRecord, SessionRecord, SessionState
from tests.orchestrator.fakes import SESSION, FakePNodes, graph, info, record

A, B, C = PNodeId("a"), PNodeId("b"), PNodeId("c")
ONE = (info("a"),)
TWO = (info("a"), info("b"))
THREE = (*TWO, info("c"))
PNodes = tuple[PNodeInfo, ...]
START = StartSession(1, SESSION, graph())
SUSPEND = SuspendSession(2, SESSION)
FIRST = Epoch(1)
S = SessionState
SETTINGS = Settings(PNodeId("trainer-1"), "file:///data")

Lose = Callable[[SessionEvent], bool]
Drop = Callable[[Command], bool]
M = TypeVar("M", SessionMetrics, StepMetrics, ValidationMetrics)
ONCE = (StartSession, SuspendSession, Offered)
"""What is never repeated."""


def nothing(_what: object) -> bool:
    """Lose nothing."""
    return False


class Story:
    """A session and all that surrounds it. `lose` says which events never arrive, `drop` which commands are performed in vain.

    With `rng` events come in any order, some twice.
    """

    def __init__(self, of: SessionRecord, overflow: frozenset[int] = frozenset(), rng: np.random.Generator | None = None) -> None:
        self.session = Session(of, SETTINGS)
        self.pnodes = FakePNodes(overflow)
        self.commands: list[Command] = []
        self.lose: Lose = nothing
        self.drop: Drop = nothing
        self.now = 0.0
        self.rng = rng
        self.there: dict[PNodeId, PNodeInfo] = {}
        """PNodes that beat: those that were offered."""

    def tell(self, *events: SessionEvent) -> list[Command]:
        """Hand events in, and everything that follows from them, 10 ms apart; returns the commands."""
        waiting = deque(events)
        before = len(self.commands)
        while waiting:
            if self.rng is not None:
                waiting.rotate(int(self.rng.integers(len(waiting))))
            event = waiting.popleft()
            if self.rng is not None and self.rng.random() < 0.2 and not isinstance(event, ONCE):
                waiting.append(event)
            if isinstance(event, Offered):
                self.there.update({info.pnode: info for info in event.pnodes})
            self.now += 0.01
            for command in self.session.handle(event, self.now):
                self.commands.append(command)
                waiting.extend(said for said in self._answers(command) if not self.lose(said))
            self.session.validate()
        return self.commands[before:]

    def wait(self, seconds: float) -> list[Command]:
        """Time passes: every half second everyone beats and says again what had no effect, and deadlines are kept."""
        before, end = len(self.commands), self.now + seconds
        while self.now < end:
            beat_at = self.now + 0.5
            while (due := self.session.deadline()) is not None and due < beat_at:
                self.now = max(self.now, due)
                self.tell(Tick())
            self.now = max(self.now, beat_at)
            for pnode in sorted(self.there):
                self.beat(pnode)
                self.tell(*(said for said in self.pnodes.repeats(pnode) if not self.lose(said)))
        return self.commands[before:]

    def beat(self, pnode: PNodeId) -> list[Command]:
        """Its heartbeat, as far as the session minds."""
        hosted = {one.session: one for one in self.pnodes.hosted_by(pnode)}
        minds = self.session.minds(pnode)
        return self.tell(Standing(self.there[pnode], hosted.get(SESSION))) if minds else []

    def _answers(self, command: Command) -> list[SessionEvent]:
        if self.drop(command):
            return []
        match command:
            case Publish(_, Decision() | Complete() as message):
                hosting = self.pnodes.hosted.get((message.session, message.epoch))
                return [said for pnode in sorted(hosting.parts) for said in self.pnodes.told(pnode, message)] if hosting else []
            case Publish(subject, message):
                return list(self.pnodes.told(PNodeId(subject.split(".")[2]), message))
            case SendHop(to, hop, payload):
                return list(self.pnodes.fed(to, hop, payload))
            case ReadBatch(session, epoch, _dataset, seed, step, batch, seq_len):
                return [BatchRead(session, epoch, step, tokens(seed, step, batch, seq_len))]
            case ReadWindows():
                return [windows(command)]
            case WriteManifest(of, step, _kernel, _parts, scaler):
                return [ManifestWritten(of.session, of.epoch, CheckpointRecord(step, f"key{step}", scaler))]
            case _:
                return []

    @property
    def state(self) -> SessionState:
        """Of the session."""
        return self.session.record.state

    @property
    def kept(self) -> list[int]:
        """The steps of its checkpoints."""
        return [checkpoint.step for checkpoint in self.session.record.checkpoints]

    @property
    def states(self) -> list[tuple[str, int]]:
        """Every (state, step) that was told to whoever watches."""
        return [(m.state, m.step) for m in self.measured(SessionMetrics)]

    @property
    def rows(self) -> dict[int, tuple[float, float, bool]]:
        """(loss, norm, skipped) of every step, as it was told last."""
        return {row.step: (row.loss, row.grad_norm, row.skipped) for row in self.measured(StepMetrics)}

    def measured(self, kind: type[M]) -> list[M]:
        """All metrics of a kind."""
        return [command.metric for command in self.commands if isinstance(command, Measured) and isinstance(command.metric, kind)]

    def sent(self, kind: type) -> list[tuple[str, object]]:
        """(subject, message) of all control messages of a kind."""
        return [(c.subject, c.message) for c in self.commands if isinstance(c, Publish) and isinstance(c.message, kind)]


WINDOWS = 7
"""Of the validation split, of which the last is short."""


def windows(ask: ReadWindows) -> WindowsRead:
    """A micro-batch of the validation split."""
    numbers = np.arange(WINDOWS * ask.seq_len + 1, dtype=np.int64) % 11
    numbers[-2:] = -1
    whole = np.stack([numbers[at * ask.seq_len : (at + 1) * ask.seq_len + 1] for at in range(WINDOWS)])
    rows = whole[ask.micro * ask.rows : (ask.micro + 1) * ask.rows]
    return WindowsRead(ask.session, ask.epoch, ask.step, ask.micro, WINDOWS, 4.0, rows)


def tokens(seed: int, step: int, batch: int, seq_len: int) -> np.ndarray:
    """Ids that depend on the seed and the step."""
    return np.arange(batch * (seq_len + 1), dtype=np.int64).reshape(batch, seq_len + 1) * (seed + step) % 11


def trained(pnodes: PNodes, **options: int) -> Story:
    """A whole run."""
    story = Story(record(**options))
    story.tell(START, Offered(pnodes))
    return story


def running(pnodes: PNodes = TWO, until: int = 2, steps: int = 50, **hyper: int) -> Story:
    """A run that has done step `until` and gets no batch of a later one: silence of its PNodes means nothing."""
    story = Story(record(steps, **hyper))
    story.lose = lambda event: isinstance(event, BatchRead) and event.step > until
    story.tell(START, Offered(pnodes))
    assert (story.state, story.session.step) == (S.RUNNING, until)
    return story
