"""An orchestrator process: it stands by, leads while it has the lease, and stands by again, as `dcnr.orchestrator.shell` does.

Rule 1: the real lease, store and machine; only waiting is done on virtual time.
Rule 2: records are written in the order of their first change, newest value only, until the server takes them; a conflict means that
somebody else leads.
Rule 3: a leader whose lease is older than its give-up time performs no command.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from random import Random
from typing import assert_never, get_args

import numpy as np

from dcnr.bus import codec, subjects
from dcnr.bus.messages import Echo, Heartbeat, Report, SessionMetrics
from dcnr.errors import DcnrError, WorldError
from dcnr.ids import Epoch, PNodeId
from dcnr.orchestrator.cluster import Cluster
from dcnr.orchestrator.commands import (
    Answer,
    Command,
    Drop,
    Erase,
    Measured,
    Prune,
    Publish,
    ReadBatch,
    ReadWindows,
    SendHop,
    SetPeers,
    Spoke,
    WriteManifest,
)  # fmt: skip
from dcnr.orchestrator.commands import Store as StoreRecord
from dcnr.orchestrator.events import (
    BatchRead,
    Disconnected,
    Echoed,
    Event,
    Heard,
    ManifestFailed,
    ManifestWritten,
    Reported,
    Tick,
    WindowsRead,
)
from dcnr.orchestrator.leader import BUCKET, LOOK_EVERY, ONE_SERVER, Lease, LeaseLost
from dcnr.orchestrator.session import Settings
from dcnr.orchestrator.shell import ECHO_EVERY, EPOCHS, RETRY_AFTER, manifest_of
from dcnr.orchestrator.state import ACTIVE, CheckpointRecord, Record, SessionState, key_of
from dcnr.orchestrator.store import BUCKETS, Place, Store, caught_up
from dcnr.storage.checkpoint import delete_checkpoints, write_manifest
from tests.simulation.disk import URL
from tests.simulation.net import Reached
from tests.simulation.networks import WINDOWS, graph_of, tokens, windows
from tests.simulation.process import OwnClock, Process
from tests.simulation.surroundings import Row, Surroundings


class Orchestrator(Process[Event, Command]):
    """One life of an orchestrator process."""

    machine: Cluster

    def __init__(self, name: PNodeId, around: Surroundings, rng: Random) -> None:
        super().__init__(name, around.scheduler, rng)
        self.around = around
        self.me = name
        self.leads = False
        """Whether it has a machine, and performs what that decides."""
        self.lease = self._new_lease()
        self._store: Store
        self._term = 0
        """Counts its times of leading, so that what one left behind does not meddle with the next."""
        self._waiting: dict[Place, Record | None] = {}
        self._writing = False
        self._echoes = 0
        self._transfers = 0
        self._state = ""
        """Of the session, as last told."""
        self.after(rng.uniform(0.0, 0.05), self._candidate)

    def tick(self) -> Event:
        return Tick()

    def _new_lease(self) -> Lease:
        return Lease(self._bucket(BUCKET), self.me, OwnClock(self))

    def _bucket(self, name: str) -> Reached:
        return Reached(self.around.net.bucket(name), self.around.net, self.name)

    # -- the lease ---------------------------------------------------------------------------------------------------------

    def _candidate(self) -> None:
        if self.around.now(self.lease._try()):
            self._term += 1
            self.after(ONE_SERVER.renew, partial(self._keep, self._term))
            self.work(0.002, 0.02, partial(self._take_over, self._term))
        else:
            self.after(LOOK_EVERY, self._candidate)

    def _keep(self, term: int) -> None:
        if term != self._term:
            return
        try:
            self.around.now(self.lease._renew())
        except LeaseLost:
            self._stand_by()
        else:
            self.after(ONE_SERVER.renew, partial(self._keep, term))

    def _stand_by(self) -> None:
        self._term += 1
        self.leads = self._writing = False
        self.around.net.leave(self)
        self._waiting.clear()
        self.around.now(self.lease.release())
        self.lease = self._new_lease()
        self.after(RETRY_AFTER, self._candidate)

    # -- leading -----------------------------------------------------------------------------------------------------------

    def _take_over(self, term: int) -> None:
        if term != self._term:
            return
        self._store = Store({bucket: self._bucket(bucket) for bucket in BUCKETS.values()}, self.lease.term)
        try:
            records = self.around.now(caught_up(self.around.now(self._store.take_over()), self.around.disk))
        except (WorldError, LeaseLost):
            self._stand_by()
            return
        under_way = [one for one in records.sessions if one.state in ACTIVE or one.state is SessionState.WAITING]
        graphs = {record.session: graph_of(record.network_file) for record in under_way}
        settings = Settings(self.me, URL, Epoch(self.lease.term * EPOCHS))
        self.leads = True
        self.machine = Cluster(records, graphs, settings, self.now)
        net = self.around.net
        for subject in (subjects.HEARTBEATS, subjects.REPORTS, subjects.peer(self.me, "echo"), subjects.DISCONNECTS):
            net.subscribe(self, subject, self._hear)
        for command in self.machine.opening():
            self._do(partial(self.perform, command))
        self.around.note("leading", self)
        self._arm()
        self._echo(term)

    def _echo(self, term: int) -> None:
        if term == self._term:
            self._echoes += 1
            self.around.net.publish(self, subjects.peer(self.me, "echo"), codec.encode(Echo(self.me, self._echoes)), "Echo")
            self.after(ECHO_EVERY, partial(self._echo, term))

    def _hear(self, data: bytes) -> None:
        if not self.leads:
            return
        if data.startswith(b"closed "):
            self.put(Disconnected(PNodeId(data.decode().removeprefix("closed "))))
            return
        message = codec.decode(data)
        if isinstance(message, Heartbeat):
            self.put(Heard(message))
        elif isinstance(message, Echo) and message.sender == self.me:
            self.put(Echoed())
        elif isinstance(message, get_args(Report)):
            self.put(Reported(message))

    # -- out ---------------------------------------------------------------------------------------------------------------

    def perform(self, command: Command) -> None:
        if not self.leads or not self._may():
            return
        match command:
            case Publish(subject, message):
                kind = type(message).__name__
                self.around.note({"Deploy": "placing", "Decision": "deciding"}.get(kind, "telling"), self)
                if self.alive:
                    self.around.net.publish(self, subject, codec.encode(message), kind)
            case SendHop():
                self._send_hop(command)
            case ReadBatch():
                self.work(0.0005, 0.005, partial(self._batch_read, self._term, command))
            case ReadWindows():
                self.work(0.0005, 0.005, partial(self._windows_read, self._term, command))
            case WriteManifest():
                self.around.note("completing", self)
                self.work(0.001, self.around.storage_takes, partial(self._write_manifest, self._term, command))
            case Prune():
                self.work(0.001, self.around.storage_takes, partial(self._prune, command))
            case Measured(metric):
                if isinstance(metric, SessionMetrics):
                    self._see(metric.state)
                else:
                    self.work(0.0005, 0.003, partial(self._row, self._term, metric))
            case StoreRecord(record):
                self._write((BUCKETS[type(record)], key_of(record)), record)
            case Drop(bucket, key):
                self._write((bucket, key), None)
            case SetPeers() | Erase() | Answer() | Spoke():
                pass
            case _:
                assert_never(command)

    def _row(self, term: int, metric: Row) -> None:
        if term == self._term:
            self.around.row(metric)

    def _see(self, state: str) -> None:
        if self._state == SessionState.ADOPTING and state in (SessionState.RUNNING, SessionState.DEPLOYING):
            self.around.seen["adopted"] += 1
        if self._state in ACTIVE and state == SessionState.WAITING:
            self.around.seen["back"] += 1
        self._state = state
        if state == SessionState.ADOPTING:
            self.around.note("adopting", self)

    def _may(self) -> bool:
        try:
            self.lease.check()
        except LeaseLost:
            self._stand_by()
            return False
        return True

    def _result(self, term: int, event: Event) -> None:
        """The inbox is of one term: what comes of another's work is lost."""
        if term == self._term:
            self.put(event)

    def _batch_read(self, term: int, ask: ReadBatch) -> None:
        self._result(term, BatchRead(ask.session, ask.epoch, ask.step, tokens(ask.step)))

    def _windows_read(self, term: int, ask: ReadWindows) -> None:
        rows = windows()[ask.micro * ask.rows : (ask.micro + 1) * ask.rows]
        self._result(term, WindowsRead(ask.session, ask.epoch, ask.step, ask.micro, WINDOWS, 4.0, rows))

    def _send_hop(self, command: SendHop) -> None:
        session = self.machine.sessions.get(command.hop.session)
        if session is None or not session.uses(command.to, command.hop.epoch):
            return
        self.around.note("sending", self)
        fed_again = "validated again" if command.hop.phase == "eval" else "again"
        self.around.seen[fed_again] += command.hop.attempt > 0 and command.hop.micro == 0 and command.hop.source_slot == 0
        self._transfers += 1
        payload = np.ascontiguousarray(command.payload)
        hop = dataclasses.replace(command.hop, sender=self.me, transfer=self._transfers, lane="inline", nbytes=payload.nbytes)
        data = codec.encode_with_payload(hop, payload.data.cast("B"))
        if self.alive:
            self.around.net.publish(self, subjects.hop(hop.network, hop.targets[0][0], hop.phase), data, "Hop trainer")

    def _write_manifest(self, term: int, ask: WriteManifest) -> None:
        record, manifest = ask.record, manifest_of(ask)
        event: Event
        try:
            self.around.now(write_manifest(self.around.disk, manifest))
        except DcnrError as error:
            event = ManifestFailed(record.session, record.epoch, ask.step, str(error))
        else:
            self.around.note("completed", self)
            event = ManifestWritten(record.session, record.epoch, CheckpointRecord(ask.step, manifest.key, ask.scaler))
        if self.alive:
            self._result(term, event)

    def _prune(self, ask: Prune) -> None:
        for step in ask.steps:
            self.around.now(delete_checkpoints(self.around.disk, ask.session, step))

    # -- records -----------------------------------------------------------------------------------------------------------

    def _write(self, place: Place, record: Record | None) -> None:
        self._waiting[place] = record
        self._go_on_writing()

    def _go_on_writing(self) -> None:
        if self._waiting and not self._writing:
            self._writing = True
            self.work(0.001, 0.004, partial(self._write_next, self._term))

    def _write_next(self, term: int) -> None:
        if term != self._term:
            return
        self._writing = False
        self.around.note("storing", self)
        if not self.alive or not self._may():
            return
        place = next(iter(self._waiting))
        record = self._waiting.pop(place)
        try:
            self.around.now(self._store.drop(*place) if record is None else self._store.put(record))
        except LeaseLost:
            self._stand_by()
            return
        except WorldError:
            self._waiting = {place: record, **self._waiting}  # first, and with its newest value
            self._writing = True
            self.after(RETRY_AFTER, partial(self._write_next, term))
        self._go_on_writing()
