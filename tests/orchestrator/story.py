"""A session and all that surrounds it, for tests: PNodes that follow the protocol answer what it commands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from dcnr.bus.messages import (
    PNodeInfo,
    SessionMetrics,
    StepMetrics,
)
from dcnr.ids import PNodeId
from dcnr.orchestrator.commands import Command, Measured, Publish, ReadBatch, SendHop, WriteManifest
from dcnr.orchestrator.events import (
    BatchRead,
    ManifestWritten,
    Offered,
    SessionEvent,
    StartSession,
    SuspendSession,
)
from dcnr.orchestrator.session import Session, Settings
from dcnr.orchestrator.state import CheckpointRecord, SessionRecord, SessionState
from tests.orchestrator.fakes import SESSION, FakePNodes, graph, info, record

ONE = (info("a"),)
TWO = (info("a"), info("b"))
THREE = (*TWO, info("c"))
PNodes = tuple[PNodeInfo, ...]
START = StartSession(1, SESSION, graph())
SUSPEND = SuspendSession(2, SESSION)
S = SessionState

Drop = Callable[[SessionEvent], bool]
M = TypeVar("M", SessionMetrics, StepMetrics)


def nothing(_event: SessionEvent) -> bool:
    """Lose nothing."""
    return False


class Story:
    """A session and all that surrounds it; `lose` says which events never arrive. With `rng` they come in any order, some twice."""

    def __init__(self, of: SessionRecord, overflow: frozenset[int] = frozenset(), rng: np.random.Generator | None = None) -> None:
        self.session = Session(of, Settings(PNodeId("trainer-1"), "file:///data"))
        self.pnodes = FakePNodes(overflow)
        self.commands: list[Command] = []
        self.lose: Drop = nothing
        self.now = 0.0
        self.rng = rng

    def tell(self, *events: SessionEvent) -> list[Command]:
        """Hand events in, and everything that follows from them, 10 ms apart; returns the commands."""
        waiting = deque(events)
        before = len(self.commands)
        while waiting:
            if self.rng is not None:
                waiting.rotate(int(self.rng.integers(len(waiting))))
            event = waiting.popleft()
            if self.rng is not None and self.rng.random() < 0.2 and not isinstance(event, StartSession | SuspendSession | Offered):
                waiting.append(event)
            self.now += 0.01
            for command in self.session.handle(event, self.now):
                self.commands.append(command)
                waiting.extend(said for said in self._answers(command) if not self.lose(said))
            self.session.validate()
        return self.commands[before:]

    def _answers(self, command: Command) -> list[SessionEvent]:
        match command:
            case Publish(subject, message):
                return list(self.pnodes.told(PNodeId(subject.split(".")[2]), message))
            case SendHop(to, hop, payload):
                return list(self.pnodes.fed(to, hop, payload))
            case ReadBatch(session, epoch, _dataset, seed, step, batch, seq_len):
                return [BatchRead(session, epoch, step, tokens(seed, step, batch, seq_len))]
            case WriteManifest(of, step, _kernel, _parts, scaler):
                return [ManifestWritten(of.session, of.epoch, CheckpointRecord(step, f"key{step}", scaler))]
            case _:
                return []

    @property
    def state(self) -> SessionState:
        """Of the session."""
        return self.session.record.state

    @property
    def states(self) -> list[tuple[str, int]]:
        """Every (state, step) that was told to whoever watches."""
        return [(m.state, m.step) for m in self.measured(SessionMetrics)]

    def measured(self, kind: type[M]) -> list[M]:
        """All metrics of a kind."""
        return [command.metric for command in self.commands if isinstance(command, Measured) and isinstance(command.metric, kind)]

    def sent(self, kind: type) -> list[tuple[str, object]]:
        """(subject, message) of all control messages of a kind."""
        return [(c.subject, c.message) for c in self.commands if isinstance(c, Publish) and isinstance(c.message, kind)]


def tokens(seed: int, step: int, batch: int, seq_len: int) -> np.ndarray:
    """Ids that depend on the seed and the step."""
    return np.arange(batch * (seq_len + 1), dtype=np.int64).reshape(batch, seq_len + 1) * (seed + step) % 11


def trained(pnodes: PNodes, **options: int) -> Story:
    """A whole run."""
    story = Story(record(**options))
    story.tell(START, Offered(pnodes))
    return story
