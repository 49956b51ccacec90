"""A whole cluster on a virtual clock: leaders that follow one another on the same records, and PNodes that beat, die, hang and come back.

Everything is lost, repeated and put in another order as the seed says; time passes only in `wait`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dcnr.bus.messages import Complete, Decision, Heartbeat, PNodeInfo, Report, StepMetrics, ValidationMetrics
from dcnr.ids import Epoch, PNodeId, SessionId
from dcnr.orchestrator.cluster import Cluster
from dcnr.orchestrator.commands import (
    Answer,
    Command,
    Drop,
    Measured,
    Prune,
    Publish,
    ReadBatch,
    ReadWindows,
    SendHop,
    Store,
    WriteManifest,
)
from dcnr.orchestrator.events import (
    BatchRead,
    CreateSession,
    Echoed,
    Event,
    Heard,
    ManifestWritten,
    Reported,
    Tick,
)
from dcnr.orchestrator.planning import graphs_of
from dcnr.orchestrator.session import Session, Settings
from dcnr.orchestrator.state import (
    AssignmentRecord,
    CheckpointRecord,
    NetworkRecord,
    PNodeRecord,
    Record,
    Records,
    SessionRecord,
    SessionState,
    key_of,
)
from tests.orchestrator.fakes import SESSION, FakePNodes, Told, graph, info
from tests.orchestrator.story import tokens, windows

EPOCHS = 1000
"""Of each term."""
LATENCY = 0.002
"""Seconds that a message takes."""
PACE = 0.1
"""Seconds until a hop is computed."""


class Stage:
    """The cluster. `loss` is the share of messages that are lost; as many come twice, and all of them out of order."""

    def __init__(self, of: SessionRecord, pnodes: str = "ab", seed: int = 0, loss: float = 0.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.loss = loss
        self.now = 0.0
        self.term = 0
        self.pnodes = FakePNodes()
        self.there: dict[PNodeId, PNodeInfo] = {}
        self.silent: set[PNodeId] = set()
        """They are cut off: what they say and what they are told is lost."""
        self.records: dict[tuple[type[Record], str], Record] = {}
        self.storage: dict[int, CheckpointRecord] = {}
        self.rows: dict[int, StepMetrics] = {}
        self.validations: dict[int, ValidationMetrics] = {}
        self.commands: list[Command] = []
        self.deaf = False
        self._line: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._processes = 0
        self._beat_at = 0.0
        for name in pnodes:
            self.join(name)
        self.lead()
        self.put(CreateSession(1, of, graph()))

    # -- what happens to it ------------------------------------------------------------------------------------------------

    def join(self, name: str) -> None:
        """A process starts."""
        self._processes += 1
        self.there[PNodeId(name)] = info(name, incarnation=str(self._processes))

    def kill(self, name: str) -> None:
        """A process dies."""
        del self.there[PNodeId(name)]
        self.pnodes.dies(PNodeId(name))

    def lead(self) -> None:
        """A new leader takes over from the records; the old one is gone, with all that it had not written or sent."""
        self.term += 1
        found = {cls: tuple(r for (c, _), r in self.records.items() if c is cls) for cls in (NetworkRecord, AssignmentRecord, PNodeRecord)}
        sessions = tuple(self._caught_up(r) for r in self.records.values() if isinstance(r, SessionRecord))
        records = Records(found[NetworkRecord], sessions, found[AssignmentRecord], found[PNodeRecord])  # type: ignore[arg-type]
        settings = Settings(PNodeId(f"leader-{self.term}"), "file:///data", Epoch(self.term * EPOCHS))
        self.cluster = Cluster(records, graphs_of(sessions), settings, self.now)
        self._perform(self.cluster.opening())

    def _caught_up(self, record: SessionRecord) -> SessionRecord:
        known = {checkpoint.step for checkpoint in record.checkpoints}
        found = [self.storage[step] for step in self.storage if step not in known and step > max(known, default=-1)]
        return replace(record, checkpoints=(*record.checkpoints, *found))

    # -- time --------------------------------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self.now < end:
            self._next(end)

    def until(self, condition: Callable[[], bool], limit: float = 600.0) -> None:
        """Let time pass until something holds."""
        end = self.now + limit
        while not condition():
            assert self.now < end, f"not within {limit:g} s: {self.session.record.state} at step {self.session.step}, {self.session.reason}"
            self._next(end)

    def _next(self, end: float) -> None:
        due = self.cluster.deadline()
        times = [self._beat_at, end, *([due] if due is not None else []), *([min(self._line)[0]] if self._line else [])]
        self.now = max(self.now, min(times))
        if self._line and min(self._line)[0] <= self.now:
            item = min(self._line)
            self._line.remove(item)
            item[2]()
        elif due is not None and due <= self.now:
            self.put(Tick())
        elif self._beat_at <= self.now:
            self._beat_at = self.now + 0.5
            self._beat()

    def _beat(self) -> None:
        if not self.deaf:
            self.put(Echoed())
        for pnode, info_ in sorted(self.there.items()):
            if pnode not in self.silent and not self.deaf:
                self.put(Heard(Heartbeat(info_, self.pnodes.hosted_by(pnode))))
            self._say(pnode, self.pnodes.repeats(pnode))

    # -- messages ----------------------------------------------------------------------------------------------------------

    def put(self, event: Event) -> None:
        """The leader takes an event."""
        self._perform(self.cluster.handle(event, self.now))
        self.cluster.validate()

    def _send(self, act: Callable[[], None], lossy: bool = True, takes: float = LATENCY) -> None:
        times = 1
        if lossy and self.loss:
            times = int(self.rng.choice([0, 1, 2], p=[self.loss, 1 - 2 * self.loss, self.loss]))
        for _ in range(times):
            self._number += 1
            delay = takes * (1 + 3 * float(self.rng.random()) if self.loss else 1)
            self._line.append((self.now + delay, self._number, act))

    def _say(self, pnode: PNodeId, reports: list[Report]) -> None:
        term = self.term
        for report in reports:

            def hear(report: Report = report) -> None:
                if self.term == term and not self.deaf and pnode not in self.silent:
                    self.put(Reported(report))

            self._send(hear)

    def _tell(self, pnode: PNodeId, message: Told) -> None:
        def reach() -> None:
            if pnode in self.there and pnode not in self.silent:
                self._say(pnode, self.pnodes.told(pnode, message))

        self._send(reach)

    def _perform(self, commands: list[Command]) -> None:
        for command in commands:
            self.commands.append(command)
            match command:
                case Publish(_, Decision() | Complete() as message):
                    for pnode in sorted(self.there):
                        self._tell(pnode, message)
                case Publish(subject, message):
                    self._tell(PNodeId(subject.split(".")[2]), message)
                case SendHop():
                    self._feed(command)
                case Store(record):
                    self.records[type(record), key_of(record)] = record
                case Drop() | Answer():
                    pass
                case Measured(StepMetrics() as row):
                    self.rows[row.step] = row
                case Measured(ValidationMetrics() as row):
                    self.validations[row.step] = row
                case _:
                    self._work(command)

    def _feed(self, command: SendHop) -> None:
        def reach() -> None:
            if command.to in self.there and command.to not in self.silent:
                self._say(command.to, self.pnodes.fed(command.to, command.hop, command.payload))

        self._send(reach, takes=PACE)

    def _work(self, command: Command) -> None:
        term = self.term

        def result() -> None:
            if self.term != term:
                return
            match command:
                case ReadBatch(session, epoch, _dataset, seed, step, batch, seq_len):
                    self.put(BatchRead(session, epoch, step, tokens(seed, step, batch, seq_len)))
                case ReadWindows():
                    self.put(windows(command))
                case WriteManifest(of, step, _kernel, _parts, scaler):
                    self.storage[step] = CheckpointRecord(step, f"key{step}.{of.epoch}", scaler)
                    self.put(ManifestWritten(of.session, of.epoch, self.storage[step]))
                case Prune(_, steps):
                    for step in steps:
                        self.storage.pop(step, None)

        self._send(result, lossy=False)

    # -- what is seen ------------------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The session."""
        return self.cluster.sessions[SessionId(SESSION)]

    @property
    def state(self) -> SessionState:
        """Its state."""
        return self.session.record.state

    @property
    def numbers(self) -> dict[int, tuple[float, bool]]:
        """(loss, skipped) of every step, in the row that counts."""
        return {step: (row.loss, row.skipped) for step, row in sorted(self.rows.items())}

    def sent(self, kind: type) -> list[Publish]:
        """All control messages of a kind."""
        return [command for command in self.commands if isinstance(command, Publish) and isinstance(command.message, kind)]
