"""One PNode: which sessions it hosts, and what its compute thread does next.

Rule 1: a deploy of a newer epoch replaces an older one, and inherits its copy of the state to begin with; whatever else belongs to an
older epoch is dropped and counted.
Rule 2: what does not fit in memory, or finds no storage, is refused, with the reason, and nothing of it is kept.
Rule 3: at most `QUEUED` jobs are at the compute thread: enough to hide the hand-over, few enough that urgent work comes soon.
Rule 4: sessions take turns.
Rule 5: a name belongs to the process that has had it longest. Whoever hears an older one under its own name says good-bye and ends.
"""

from __future__ import annotations

from typing import assert_never

from dcnr.agents.commands import Beat, Command, Evict, GiveWay, Install, Prepare, SendReport
from dcnr.agents.copies import Copy
from dcnr.agents.events import (
    Aborted,
    Applied,
    Evaluated,
    Event,
    Folded,
    HopArrived,
    Installed,
    JobEvent,
    JobFailed,
    NameHeard,
    PassDone,
    Prepared,
    ReadDone,
    Sending,
    Settled,
    SetupFailed,
    SetupRefused,
    SnapshotTaken,
    Stop,
    Tick,
    Told,
    Uploaded,
    UploadFailed,
)
from dcnr.agents.hosted import HostedSession
from dcnr.agents.reading import HostedReading
from dcnr.agents.telemetry import Telemetry
from dcnr.bus.messages import CommandMessage, Complete, Decision, Deploy, Heartbeat, PNodeInfo, Refused, Save, StepMessage, Undeploy
from dcnr.errors import InvariantError
from dcnr.ids import Epoch, SessionId

QUEUED = 2
"""Jobs at the compute thread: the one that runs, and the next."""
HEARTBEAT_EVERY = 0.5
"""Seconds."""
SAME_AGE = 0.2
"""Seconds by which ages must differ to tell which process is the older one: more than a heartbeat is on its way."""


Part = HostedSession | HostedReading
"""What it has of a session: to train it, or to generate."""


class PNode:
    """The machine of one agent process, born `now`. `info.memory_total` is what it may hold, in bytes."""

    def __init__(self, info: PNodeInfo, telemetry: Telemetry, now: float) -> None:
        self.sessions: dict[SessionId, Part] = {}
        """In the order in which they are served next."""
        self.stopping = False
        self._me = info.pnode
        self._incarnation = info.incarnation
        self._memory = info.memory_total
        self._born = now
        self.telemetry = telemetry
        self._gone: dict[SessionId, Epoch] = {}
        """The newest epoch that was let go of, per session."""
        self._at_work = 0
        self._next_beat = now

    @property
    def used(self) -> int:
        """Bytes that the hosted sessions take."""
        return sum(session.bytes for session in self.sessions.values())

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event at time `now` (seconds) and return what must be done, in order."""
        commands = self._react(event, now)
        while self._at_work < QUEUED and (job := self._next_job(now)) is not None:
            self._at_work += 1
            commands.append(job)
        return commands

    def deadline(self) -> float | None:
        """When the next heartbeat or repetition is due."""
        repeats = [due for session in self.sessions.values() if (due := session.deadline()) is not None]
        return min([self._next_beat, *repeats])

    def validate(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        for session in self.sessions.values():
            session.validate()
        if not 0 <= self._at_work <= QUEUED:
            raise InvariantError(f"{self._at_work} jobs at the compute thread")
        if self.used > self._memory:
            raise InvariantError(f"{self.used} bytes held, {self._memory} allowed")

    def _react(self, event: Event, now: float) -> list[Command]:
        match event:
            case Told(message):
                return self._told(message, now)
            case NameHeard(beat):
                return self._name_heard(beat, now)
            case HopArrived(hop, payload):
                session = self._session(hop.session, hop.epoch)
                return session.hop(hop, payload) if session else []
            case Prepared():
                return self._prepared(event)
            case Installed(name, epoch, tensors):
                session = self._session(name, epoch)
                if isinstance(session, HostedReading):
                    return session.installed()
                return session.installed(tensors, now) if session else []
            case SetupRefused(name, epoch, reason, damaged):
                session = self._session(name, epoch)
                return self._refuse(session, reason, damaged) if session else []
            case SetupFailed(name, epoch):
                session = self._session(name, epoch)
                return session.failed(event, now) if session else []
            case Uploaded(name, epoch, step, part, state):
                session = self._trained(name, epoch)
                return session.copies.uploaded(step, part, state) if session else []
            case UploadFailed(name, epoch, step, message):
                session = self._trained(name, epoch)
                return session.copies.upload_failed(step, message) if session else []
            case Tick(sending):
                return self._tick(sending, now)
            case Stop():
                return [self._good_bye(now)]
            case _:
                return self._worked(event, now)

    def _told(self, message: CommandMessage | StepMessage, now: float) -> list[Command]:
        match message:
            case Deploy():
                return self._deploy(message)
            case Undeploy(name, epoch):
                return self._undeploy(name, epoch)
            case Save(name, epoch, step):
                session = self._trained(name, epoch)
                return session.save(step) if session else []
            case Decision():
                session = self._trained(message.session, message.epoch)
                return session.decision(message, now) if session else []
            case Complete(name, epoch, step):
                session = self._trained(name, epoch)
                if session:
                    session.copies.complete(step)
                return []
            case _:
                assert_never(message)

    def _worked(self, event: JobEvent, now: float) -> list[Command]:
        """The compute thread did a job."""
        self._at_work -= 1
        session = self._session(event.session, event.epoch)
        if session is None:
            return []
        session.answered()
        if isinstance(event, JobFailed):
            return session.failed(event, now)
        if isinstance(session, HostedReading):
            return session.done(event) if isinstance(event, ReadDone) else []
        match event:
            case PassDone():
                return session.passed(event)
            case Evaluated():
                return session.evaluated(event)
            case Folded():
                return session.folded(event, now)
            case Applied() | Aborted():
                return []
            case Settled():
                return session.settled(event, now)
            case SnapshotTaken():
                return session.snapshot_taken(event)
            case ReadDone():
                return []
            case _:
                assert_never(event)

    # -- deploy -------------------------------------------------------------------------------------------------------

    def _deploy(self, deploy: Deploy) -> list[Command]:
        hosted = self.sessions.get(deploy.session)
        if deploy.epoch <= self._gone.get(deploy.session, -1) or (hosted and deploy.epoch < hosted.deploy.epoch) or self.stopping:
            self.telemetry.drop("stale")
            return []
        if hosted and deploy.epoch == hosted.deploy.epoch:
            return hosted.deployed_again()
        commands = self._let_go(hosted) if hosted else []
        if deploy.purpose == "generate":
            self.sessions[deploy.session] = HostedReading(self._me, deploy, self.telemetry)
        else:
            self.sessions[deploy.session] = HostedSession(self._me, deploy, self.telemetry, _heritage(hosted, deploy))
        return [*commands, Prepare(deploy)]

    def _prepared(self, event: Prepared) -> list[Command]:
        session = self._session(event.deploy.session, event.deploy.epoch)
        if session is None or not session.prepares:
            return []
        free = self._memory - self.used
        if event.plan.bytes > free:
            reason = (
                f"{self._me} has {show_bytes(free)} free of {show_bytes(self._memory)}, and its part of "
                f"'{event.deploy.session}' ({len(event.plan.routes.hosted)} VNodes) needs {show_bytes(event.plan.bytes)}"
            )
            return self._refuse(session, reason, damaged=False)
        session.prepared(event.plan)
        self.telemetry.vnodes.update(event.plan.node_bytes)
        copy = session.copies.get(event.deploy.step) if isinstance(session, HostedSession) else None
        return [Install(event.deploy, event.plan, copy.tensors if copy else {})]

    def _refuse(self, session: Part, reason: str, damaged: bool) -> list[Command]:
        deploy = session.deploy
        refused = Refused(self._me, deploy.session, deploy.epoch, reason, damaged)
        return [*self._let_go(session), SendReport(deploy.network, refused)]

    def _undeploy(self, name: SessionId, epoch: Epoch) -> list[Command]:
        hosted = self.sessions.get(name)
        self._gone[name] = Epoch(max(epoch, self._gone.get(name, -1)))
        return self._let_go(hosted) if hosted and hosted.deploy.epoch <= epoch else []

    def _let_go(self, hosted: Part) -> list[Command]:
        del self.sessions[hosted.deploy.session]
        for node in hosted.nodes:
            self.telemetry.vnodes.pop(node, None)
        return [Evict(hosted.deploy.session, hosted.deploy.epoch)]

    def _trained(self, name: SessionId, epoch: Epoch) -> HostedSession | None:
        """The same of one that trains: whatever else is asked for what only training has breaks the protocol."""
        part = self._session(name, epoch)
        if isinstance(part, HostedReading):
            self.telemetry.drop("malformed")
            return None
        return part

    def _session(self, name: SessionId, epoch: Epoch) -> Part | None:
        hosted = self.sessions.get(name)
        if hosted is not None and hosted.deploy.epoch == epoch:
            return hosted
        stale = epoch < hosted.deploy.epoch if hosted else epoch <= self._gone.get(name, -1)
        self.telemetry.drop("stale" if stale else "unknown")
        return None

    # -- time and work ------------------------------------------------------------------------------------------------

    def _tick(self, sending: Sending, now: float) -> list[Command]:
        commands: list[Command] = []
        if now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_EVERY
            commands.append(self._beat(sending, now))
        for session in self.sessions.values():
            commands += session.tick(now)
        return commands

    def _beat(self, sending: Sending, now: float) -> Beat:
        hosted = tuple(one.hosted((name, one.deploy.epoch) in sending) for name, one in self.sessions.items())
        return Beat(hosted, self.stopping, now - self._born)

    def _good_bye(self, now: float) -> Beat:
        self.stopping = True
        return self._beat(frozenset(), now)

    def _name_heard(self, beat: Heartbeat, now: float) -> list[Command]:
        """One that says good-bye leaves the name to us. Where the ages are the same, the smaller incarnation counts as the older one."""
        if beat.info.incarnation == self._incarnation or beat.stopping or self.stopping:
            return []
        older_by = beat.age - (now - self._born)
        if older_by > SAME_AGE or (older_by >= -SAME_AGE and beat.info.incarnation < self._incarnation):
            return [GiveWay(beat.info), self._good_bye(now)]
        return []

    def _next_job(self, now: float) -> Command | None:
        for name, session in list(self.sessions.items()):
            job = session.next_job(now)
            if job is not None:
                self.sessions[name] = self.sessions.pop(name)  # to the end of the line
                return job
        return None


def _heritage(older: Part | None, deploy: Deploy) -> Copy | None:
    """What a part takes over of the older one: its copy of the state to begin with, if it is of the same training."""
    if not isinstance(older, HostedSession) or _training(older.deploy) != _training(deploy):
        return None
    return older.copies.get(deploy.step)


def _training(deploy: Deploy) -> tuple[object, ...]:
    """All that a state depends on, besides the step."""
    return deploy.network_file, deploy.fuse, deploy.hyper, deploy.seed, deploy.total_steps, deploy.batch, deploy.micro_batches


def show_bytes(size: float) -> str:
    """`3.2 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
