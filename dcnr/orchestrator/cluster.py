"""The whole orchestrator as one machine: networks, the fleet, and the sessions on it.

Rule 1: every request is answered once; a refused one changes nothing. A deletion is answered when the files are gone.
Rule 2: waiting sessions are offered the fleet, oldest first, when it grows, when another session lets go, and every 5 s.
Rule 3: a PNode that hosts what it should not (an old epoch, a deleted session) is told to let go with each heartbeat that says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from dcnr.bus import subjects
from dcnr.bus.messages import Heartbeat, Hosted, Refused, SessionMetrics, Undeploy
from dcnr.errors import AlreadyExists, NotFound, UserError
from dcnr.ids import NetworkId, PNodeId, SessionId
from dcnr.orchestrator.commands import Answer, Command, Drop, Erase, Measured, Publish, SetPeers, Store
from dcnr.orchestrator.events import (
    Ask,
    CreateSession,
    DeleteSession,
    Draining,
    DrainPNode,
    DropNetwork,
    Erased,
    Event,
    Heard,
    Lost,
    Offered,
    PutNetwork,
    Reported,
    SessionEvent,
    StartSession,
    SuspendSession,
    Tick,
)
from dcnr.orchestrator.fleet import Changed, Drained, Fleet, FleetChange, Forgotten, Gone, Joined
from dcnr.orchestrator.session import Session, Settings
from dcnr.orchestrator.state import ACTIVE, NetworkRecord, Records, SessionState, after_restart

OFFER_EVERY = 5.0
"""Seconds after which waiting sessions are offered the fleet again: memory may have become free."""


class Cluster:
    """Everything the leader knows and decides."""

    def __init__(self, records: Records, settings: Settings, now: float) -> None:
        self.settings = settings
        self.networks = {record.name: record for record in records.networks}
        self.fleet = Fleet(records.pnodes, now)
        restarted = {record.session: after_restart(record) for record in records.sessions}
        self.sessions = {name: Session(record, settings) for name, record in restarted.items()}
        self._stopped = [restarted[record.session] for record in records.sessions if restarted[record.session] != record]
        self.stray = 0
        """Reports about sessions nobody knows."""
        self._offer_at = now + OFFER_EVERY

    def opening(self) -> list[Command]:
        """What a new leader does first: write down and tell which sessions the change of leader suspended."""
        metrics = [SessionMetrics(record.session, record.state, record.step, record.reason, record.fault) for record in self._stopped]
        return [*(Store(record) for record in self._stopped), *(Measured(metric) for metric in metrics)]

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event."""
        match event:
            case Heard(beat):
                return self._fleet_changed(self.fleet.handle(event, now), now) + self._strays(beat)
            case Tick():
                return self._tick(event, now)
            case Reported(report):
                return self._to_session(report.session, report, now)
            case Erased(request, name, message):
                return [Answer(request, _left_behind(name, message) if message is not None else None)]
            case PutNetwork() | DropNetwork() | CreateSession() | StartSession() | SuspendSession() | DeleteSession() | DrainPNode():
                return self._ask(event, now)
            case _:
                return self._to_session(event.session, event, now)

    def deadline(self) -> float | None:
        """The earliest deadline of the fleet, a session, or the next offer."""
        waiting = any(session.record.state is SessionState.WAITING for session in self.sessions.values())
        all_ = [self.fleet.deadline(), *(session.deadline() for session in self.sessions.values()), self._offer_at if waiting else None]
        return min((due for due in all_ if due is not None), default=None)

    def validate(self) -> None:
        """Raise `InvariantError` if any part contradicts itself."""
        self.fleet.validate()
        for session in self.sessions.values():
            session.validate()

    # -- time and the fleet ------------------------------------------------------------------------------------------------

    def _tick(self, tick: Tick, now: float) -> list[Command]:
        commands = self._fleet_changed(self.fleet.handle(tick, now), now)
        for name in list(self.sessions):
            commands += self._to_session(name, tick, now)
        return commands + (self._offer(now) if now >= self._offer_at else [])

    def _fleet_changed(self, changes: Sequence[FleetChange], now: float) -> list[Command]:
        commands: list[Command] = []
        for change in changes:
            match change:
                case Joined():
                    commands += [SetPeers(self.fleet.present()), *self._offer(now)]
                case Gone(pnode, reason):
                    commands += [SetPeers(self.fleet.present()), *self._to_all(Lost(pnode, reason), now)]
                case Drained(pnode):
                    commands += self._to_all(Draining(pnode), now)
                case Changed(record):
                    commands.append(Store(record))
                case Forgotten(pnode):
                    commands.append(Drop("dcnr_fleet", pnode))
                case _:
                    assert_never(change)
        return commands

    def _strays(self, beat: Heartbeat) -> list[Command]:
        pnode = beat.info.pnode
        undeploys = [Undeploy(hosted.session, hosted.epoch) for hosted in beat.hosted if not self._rightly(pnode, hosted)]
        return [Publish(subjects.command(pnode), undeploy) for undeploy in undeploys]

    def _rightly(self, pnode: PNodeId, hosted: Hosted) -> bool:
        session = self.sessions.get(hosted.session)
        return session is not None and session.uses(pnode, hosted.epoch)

    # -- sessions ----------------------------------------------------------------------------------------------------------

    def _to_all(self, event: SessionEvent, now: float) -> list[Command]:
        return [command for name in list(self.sessions) for command in self._to_session(name, event, now)]

    def _to_session(self, name: SessionId, event: SessionEvent, now: float) -> list[Command]:
        session = self.sessions.get(name)
        if session is None:
            self.stray += 1
            return []
        active = session.record.state in ACTIVE
        commands = session.handle(event, now)
        if active and session.record.state not in ACTIVE:
            return commands + self._offer(now, but=name if isinstance(event, Refused) else None)
        return commands

    def _offer(self, now: float, but: SessionId | None = None) -> list[Command]:
        self._offer_at = now + OFFER_EVERY
        offered = Offered(self.fleet.eligible())
        waiting = [session for name, session in self.sessions.items() if session.record.state is SessionState.WAITING and name != but]
        return [command for session in waiting for command in session.handle(offered, now)]

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
            case StartSession() | SuspendSession() | DeleteSession():
                return self._session_objection(ask)
            case _:
                assert_never(ask)

    def _session_objection(self, ask: StartSession | SuspendSession | DeleteSession) -> UserError | None:
        session = self.sessions.get(ask.session)
        if session is None:
            return NotFound(f"no session '{ask.session}'", "see `dcnr session list`")
        if not isinstance(ask, DeleteSession):
            objection = session.objection(ask)
            return UserError(objection) if objection else None
        if session.record.state in ACTIVE:
            return UserError(f"session '{ask.session}' is {session.record.state}", f"first: dcnr session suspend {ask.session}")
        return None

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
            case SuspendSession(session=name):
                return self._to_session(name, ask, now)
            case DeleteSession(session=name):
                return self._delete(ask.request, name)
            case DrainPNode():
                return self._fleet_changed(self.fleet.handle(ask, now), now)
            case _:
                assert_never(ask)

    def _put(self, record: NetworkRecord) -> list[Command]:
        old = self.networks.get(record.name)
        self.networks[record.name] = replace(record, revision=old.revision + 1 if old else 1)
        return [Store(self.networks[record.name])]

    def _create(self, ask: CreateSession, now: float) -> list[Command]:
        session = self.sessions[ask.record.session] = Session(ask.record, self.settings)
        created = (self._put(ask.network) if ask.network else []) + session.created()
        if ask.graph is None:
            return created
        start = StartSession(ask.request, ask.record.session, ask.graph)
        return created + session.handle(start, now) + self._offer(now)

    def _delete(self, request: int, name: SessionId) -> list[Command]:
        record = self.sessions.pop(name).record
        gone = SessionMetrics(name, "deleted", record.step, "deleted by request")
        return [Drop("dcnr_sessions", name), Drop("dcnr_assignments", name), Erase(request, name), Measured(gone)]


def _left_behind(name: SessionId, message: str) -> UserError:
    return UserError(f"session '{name}' is deleted, but some of its files are not: {message}", "remove them by hand")
