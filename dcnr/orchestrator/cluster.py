"""The whole orchestrator as one machine: networks, the fleet, and the sessions on it.

Rule 1: every request is answered once; a refused one changes nothing. A deletion is answered when the files are gone.
Rule 2: waiting sessions are offered the fleet, oldest first, when it changes, when another session lets go, and every 5 s. A new leader
offers nothing before it has heard of every PNode of its records, or knows that it is dead.
Rule 3: a PNode that hosts what it should not (an old epoch, a deleted session) is told to let go with each heartbeat that says so, unless
it is stuck: then it is left alone, and offered to nobody.
Rule 4: while the orchestrator cannot hear itself no session judges anybody, and when it can again their clocks start anew.
Rule 5: when a checkpoint of a running session is complete, it is offered the fleet: it may spread over more PNodes.
Rule 6: a session that comes to train on a PNode that is being drained moves away from it.
Rule 7: checkpoints that are read are placed after sessions, and live as long as this leader: who asked asks the next one again. One that
nobody wants anything of lets go as soon as somebody waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from dcnr.bus import subjects
from dcnr.bus.messages import Failed, Heartbeat, Hosted, PNodeInfo, Refused, SessionMetrics, Undeploy
from dcnr.errors import AlreadyExists, NotFound, UserError
from dcnr.ids import NEVER, Epoch, NetworkId, PNodeId, SessionId
from dcnr.network.graph import Graph
from dcnr.orchestrator.commands import Answer, Command, Drop, Erase, Measured, Publish, SetPeers, Store
from dcnr.orchestrator.events import (
    Ask,
    AskedFor,
    BatchFailed,
    BatchRead,
    CreateSession,
    DeleteSession,
    Disconnected,
    Draining,
    DrainPNode,
    DropNetwork,
    Echoed,
    Erased,
    Event,
    Generate,
    Heard,
    LogitsRead,
    Lost,
    ManifestFailed,
    ManifestWritten,
    Offered,
    PutNetwork,
    ReadingEvent,
    RebalanceSession,
    Reported,
    SessionEvent,
    Standing,
    StartSession,
    StopGenerating,
    SuspendSession,
    Tick,
    WindowsRead,
)
from dcnr.orchestrator.fleet import Changed, Drained, Fleet, FleetChange, Forgotten, Gone, Joined
from dcnr.orchestrator.reading import ReadingState
from dcnr.orchestrator.readings import Readings
from dcnr.orchestrator.session import Session, Settings
from dcnr.orchestrator.state import ACTIVE, UNDER_WAY, NetworkRecord, Records, SessionState

OFFER_EVERY = 5.0
"""Seconds after which waiting sessions are offered the fleet again: memory may have become free."""


class Cluster:
    """Everything the leader knows and decides."""

    def __init__(self, records: Records, graphs: Mapping[SessionId, Graph | str], settings: Settings, now: float) -> None:
        """`graphs`: what `planning.graphs_of(records.sessions)` makes, in a thread: those of the sessions that are not at rest."""
        self.settings = settings
        self.networks = {record.name: record for record in records.networks}
        self.fleet = Fleet(records.pnodes, now)
        assignments = {record.session: record for record in records.assignments}
        self.sessions = {
            record.session: Session.taken_over(
                record, graphs.get(record.session), assignments.get(record.session), settings, now
            )
            for record in records.sessions
        }  # fmt: skip
        self._under_way = [record.session for record in records.sessions if record.state in UNDER_WAY]
        self._ended: dict[SessionId, Epoch] = {}
        """The newest epochs of sessions that are not known (any more): PNodes take no older one from a new session of that name."""
        self.stray = 0
        """Reports about sessions nobody knows."""
        self.readings = Readings(settings, self._free_for)
        self._offer_at = now + OFFER_EVERY

    def opening(self) -> list[Command]:
        """What a new leader does first: write down and tell what the change of leader made of sessions that were under way."""
        return [command for name in self._under_way for command in self.sessions[name].opening()]

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event."""
        match event:
            case Heard(beat):
                return self._heard(event, now) + self._strays(beat)
            case Echoed():
                return self._echoed(event, now)
            case Disconnected():
                return self._fleet_changed(self.fleet.handle(event, now), now)
            case Tick():
                return self._tick(event, now)
            case Reported(report) if report.session in self.readings.all:
                return self._to_reading(report.session, report, now)
            case Reported(report):
                return self._to_session(report.session, report, now)
            case LogitsRead(hop):
                return self._to_reading(hop.session, event, now) if hop.session in self.readings.all else []
            case AskedFor(name):
                found = self.readings.find(name)
                return found[0].handle(event, now) if found else []
            case Erased(request, name, message):
                return [Answer(request, _left_behind(name, message) if message is not None else None)]
            case BatchRead() | WindowsRead() | BatchFailed() | ManifestWritten() | ManifestFailed():
                return self._to_session(event.session, event, now)
            case _:
                return self._ask(event, now)

    def deadline(self) -> float | None:
        """The earliest deadline of the fleet, a session, or the next offer; None while it is deaf: nothing is judged then."""
        if self.fleet.deaf:
            return None
        all_ = [self.fleet.deadline(), *(session.deadline() for session in self.sessions.values()), self.readings.deadline()]
        all_.append(self._offer_at if self._somebody_waits else None)
        return min((due for due in all_ if due is not None), default=None)

    def validate(self) -> None:
        """Raise `InvariantError` if any part contradicts itself."""
        self.fleet.validate()
        for session in self.sessions.values():
            session.validate()
        for reading in self.readings.all.values():
            reading.validate()

    # -- time and the fleet ------------------------------------------------------------------------------------------------

    def _tick(self, tick: Tick, now: float) -> list[Command]:
        commands = self._fleet_changed(self.fleet.handle(tick, now), now)
        if self.fleet.deaf:
            return commands
        for name in list(self.sessions):
            commands += self._to_session(name, tick, now)
        for name in list(self.readings.all):
            commands += self._to_reading(name, tick, now)
        self._ended.update(self.readings.over())
        return commands + (self._offer(now) if now >= self._offer_at else [])

    def _fleet_changed(self, changes: Sequence[FleetChange], now: float) -> list[Command]:
        commands: list[Command] = []
        for change in changes:
            match change:
                case Joined():
                    commands += [SetPeers(self.fleet.present()), *self._offer(now)]
                case Gone(pnode, reason):
                    commands += [SetPeers(self.fleet.present()), *self._to_all(Lost(pnode, reason), now), *self._offer(now)]
                case Drained(pnode):
                    commands += self._to_all(Draining(pnode), now)
                case Changed(record):
                    commands.append(Store(record))
                case Forgotten(pnode):
                    commands.append(Drop("dcnr_fleet", pnode))
                case _:
                    assert_never(change)
        return commands

    def _echoed(self, echoed: Echoed, now: float) -> list[Command]:
        """The tick before it finds out whether we were deaf until now, although nothing happened that could tell."""
        changes = self.fleet.handle(Tick(), now)
        if self.fleet.deaf:
            for session in self.sessions.values():
                session.forgive(now)
            for reading in self.readings.all.values():
                reading.forgive(now)
        return self._fleet_changed([*changes, *self.fleet.handle(echoed, now)], now)

    def _heard(self, heard: Heard, now: float) -> list[Command]:
        beat, pnode = heard.beat, heard.beat.info.pnode
        commands = self._fleet_changed(self.fleet.handle(heard, now), now)
        member = self.fleet.members.get(pnode)
        believed = member is not None and member.present and member.record.info.incarnation == beat.info.incarnation
        if not believed or self.fleet.deaf:
            return commands
        hosted = {one.session: one for one in beat.hosted}
        for name, one in hosted.items():
            if name in self.readings.all:
                self.readings.heard(name, one.epoch)
            elif name not in self.sessions:
                self._ended[name] = max(one.epoch, self._ended.get(name, NEVER))
        for name, session in list(self.sessions.items()):
            if name in hosted:
                session.newest_epoch = max(session.newest_epoch, hosted[name].epoch)
            if session.minds(pnode):
                commands += self._to_session(name, Standing(beat.info, hosted.get(name)), now)
        for name, reading in self.readings.all.items():
            if pnode in reading.hosts:
                commands += self._to_reading(name, Standing(beat.info, hosted.get(name)), now)
        return commands

    def _strays(self, beat: Heartbeat) -> list[Command]:
        pnode = beat.info.pnode
        undeploys = [Undeploy(hosted.session, hosted.epoch) for hosted in beat.hosted if not self._rightly(pnode, hosted)]
        return [Publish(subjects.command(pnode), undeploy) for undeploy in undeploys]

    def _rightly(self, pnode: PNodeId, hosted: Hosted) -> bool:
        session = self.sessions.get(hosted.session)
        return self.uses(hosted.session, pnode, hosted.epoch) or (session is not None and pnode in session.doubts.avoided)

    def uses(self, name: SessionId, pnode: PNodeId, epoch: Epoch) -> bool:
        """Whether `pnode` rightly hosts a part of a session, or of a checkpoint that is read, in `epoch`."""
        session = self.sessions.get(name)
        return session.uses(pnode, epoch) if session else self.readings.uses(name, pnode, epoch)

    # -- sessions ----------------------------------------------------------------------------------------------------------

    def _to_all(self, event: Lost | Draining, now: float) -> list[Command]:
        commands = [command for name in list(self.sessions) for command in self._to_session(name, event, now)]
        return commands + [command for name in self.readings.all for command in self._to_reading(name, event, now)]

    def _to_session(self, name: SessionId, event: SessionEvent, now: float) -> list[Command]:
        session = self.sessions.get(name)
        if session is None:
            self.stray += 1
            return []
        before, session.read = session.record.state, self.readings.steps_of(name)
        commands = session.handle(event, now)
        after = session.record.state
        if before in ACTIVE and after not in ACTIVE:
            return commands + self._offer(now, but=name if _not_at_once(session, event) else None)
        if after is SessionState.RUNNING and before is not after:
            draining = [pnode for pnode in session.hosts if pnode in self.fleet.members and self.fleet.members[pnode].record.draining]
            commands += [command for pnode in sorted(draining) for command in self._to_session(name, Draining(pnode), now)]
        if after is SessionState.RUNNING and isinstance(event, ManifestWritten):
            commands += session.handle(self._offer_to(session), now)
        return commands

    def _to_reading(self, name: SessionId, event: ReadingEvent, now: float) -> list[Command]:
        """What has gone back is offered the fleet, unless that was refused just now."""
        reading = self.readings.all[name]
        before = reading.state
        commands = reading.handle(event, now)
        retry = before is not reading.state is ReadingState.WAITING and not isinstance(event, Refused)
        return commands + (self._offer(now) if retry else [])

    def _offer(self, now: float, but: SessionId | None = None) -> list[Command]:
        self._offer_at = now + OFFER_EVERY
        if any(member.present and not member.by_us for member in self.fleet.members.values()):
            return []
        waiting = [session for name, session in self.sessions.items() if session.record.state is SessionState.WAITING and name != but]
        commands = [command for session in waiting for command in session.handle(self._offer_to(session), now)]
        commands += self.readings.place(now)
        return commands + (self.readings.make_room(now) if self._somebody_waits else [])

    @property
    def _somebody_waits(self) -> bool:
        return self.readings.waiting or any(session.record.state is SessionState.WAITING for session in self.sessions.values())

    def _offer_to(self, session: Session) -> Offered:
        return Offered(self._free_for(session.record.session))

    def _free_for(self, name: SessionId) -> tuple[PNodeInfo, ...]:
        stuck = {pnode for other in self.sessions.values() for pnode in other.doubts.avoided}
        able = [info for info in self.fleet.eligible() if info.pnode not in stuck]
        return tuple(replace(info, memory_used=info.memory_used - self._held(info, name)) for info in able)

    def _held(self, info: PNodeInfo, name: SessionId) -> int:
        """What it holds of a PNode's memory already: it is free for what it becomes."""
        return sum(hosted.bytes for hosted in self.fleet.members[info.pnode].hosted if hosted.session == name)

    # -- requests ----------------------------------------------------------------------------------------------------------

    def _ask(self, ask: Ask, now: float) -> list[Command]:
        error = self._objection(ask)
        if error is not None:
            return [Answer(ask.request, error)]
        granted = self._grant(ask, now)
        return granted if isinstance(ask, DeleteSession) else [*granted, Answer(ask.request)]

    def _objection(self, ask: Ask) -> UserError | None:
        match ask:
            case PutNetwork(_, record, replace=replace_):
                taken = record.name in self.networks and not replace_
                return AlreadyExists(f"network '{record.name}' exists", "`dcnr network update` replaces it") if taken else None
            case DropNetwork(_, name):
                return self._network_in_use(name)
            case CreateSession(_, record):
                taken = record.session in self.sessions
                return AlreadyExists(f"session '{record.session}' exists", "choose another name, or delete that session") if taken else None
            case DrainPNode(_, pnode):
                member = self.fleet.members.get(pnode)
                return None if member and member.present else NotFound(f"no PNode '{pnode}' is there", "see `dcnr pnode list`")
            case StartSession() | SuspendSession() | RebalanceSession() | DeleteSession():
                return self._session_objection(ask)
            case Generate(source=source):
                return self._name_in_use(source.name)
            case StopGenerating(_, name):
                known = self.readings.find(name)
                return None if known else NotFound(f"no request '{name}'", "it is forgotten a minute after it was last asked about")
            case _:
                assert_never(ask)

    def _session_objection(self, ask: StartSession | SuspendSession | RebalanceSession | DeleteSession) -> UserError | None:
        session = self.sessions.get(ask.session)
        if session is None:
            return NotFound(f"no session '{ask.session}'", "see `dcnr session list`")
        if not isinstance(ask, DeleteSession):
            objection = session.objection(ask, self._offer_to(session).pnodes)
            return UserError(objection) if objection else None
        if session.record.state in ACTIVE:
            return UserError(f"session '{ask.session}' is {session.record.state}", f"first: dcnr session suspend {ask.session}")
        return None

    def _name_in_use(self, name: SessionId) -> UserError | None:
        """A session may have been given the very name."""
        taken = name in self.sessions
        return AlreadyExists(f"session '{name}' has the name of what is to be read", "delete that session") if taken else None

    def _network_in_use(self, name: NetworkId) -> UserError | None:
        if name not in self.networks:
            return NotFound(f"no network '{name}'", "see `dcnr network list`")
        users = sorted(session.record.session for session in self.sessions.values() if session.record.network == name)
        return UserError(f"network '{name}' is used by session {', '.join(users)}", "delete the session first") if users else None

    def _grant(self, ask: Ask, now: float) -> list[Command]:
        match ask:
            case PutNetwork(_, record):
                return self._put(record)
            case DropNetwork(_, name):
                del self.networks[name]
                return [Drop("dcnr_networks", name)]
            case CreateSession():
                return self._create(ask, now)
            case StartSession(session=name):
                return self.sessions[name].handle(ask, now) + self._offer(now)
            case SuspendSession(session=name) | RebalanceSession(session=name):
                return self._to_session(name, ask, now)
            case DeleteSession(session=name):
                return self._delete(ask.request, name)
            case DrainPNode():
                return self._fleet_changed(self.fleet.handle(ask, now), now)
            case Generate(source=source):
                return self.readings.generate(ask, self._ended.pop(source.name, NEVER), now) + self._offer(now)
            case StopGenerating(_, name):
                found = self.readings.find(name)
                return found[0].handle(ask, now) if found else []
            case _:
                assert_never(ask)

    def _put(self, record: NetworkRecord) -> list[Command]:
        old = self.networks.get(record.name)
        self.networks[record.name] = replace(record, revision=old.revision + 1 if old else 1)
        return [Store(self.networks[record.name])]

    def _create(self, ask: CreateSession, now: float) -> list[Command]:
        session = self.sessions[ask.record.session] = Session(ask.record, self.settings)
        session.newest_epoch = max(session.newest_epoch, self._ended.pop(ask.record.session, NEVER))
        created = (self._put(ask.network) if ask.network else []) + session.created()
        if ask.graph is None:
            return created
        start = StartSession(ask.request, ask.record.session, ask.graph)
        return created + session.handle(start, now) + self._offer(now)

    def _delete(self, request: int, name: SessionId) -> list[Command]:
        session = self.sessions.pop(name)
        record, self._ended[name] = session.record, session.newest_epoch
        gone = SessionMetrics(name, "deleted", record.step, "deleted by request")
        return [Drop("dcnr_sessions", name), Drop("dcnr_assignments", name), Erase(request, name), Measured(gone)]


def _not_at_once(session: Session, event: SessionEvent) -> bool:
    """Whether what made it wait would only happen again."""
    return (isinstance(event, Refused) and not event.damaged) or (isinstance(event, Failed) and session.doubts.setbacks > 1)


def _left_behind(name: SessionId, message: str) -> UserError:
    return UserError(f"session '{name}' is deleted, but some of its files are not: {message}", "remove them by hand")
