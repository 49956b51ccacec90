"""Who is there: PNodes from their heartbeats, judged by our clock alone.

    (unheard) --heartbeat--> alive <--heartbeat-- suspect        stopped: it said good-bye
                               |  \\--1.5 s silent--^ |            dead: silent for 3 s, or for 0.75 s after its connection was closed,
                               \\--good-bye--> stopped \\--3 s silent--> dead                 or started anew under the same name

Rule 1: of two processes under one name the one heard first counts; another is not believed before the first has been silent for 1.5 s. Then
the old process is dead: `Gone` comes before `Joined`.
Rule 2: a new leader gives everyone in its records one full time-out of grace, and work only to those that it heard itself.
Rule 3: the gone are listed for ten minutes, so that a person can read why; then they are forgotten.
Rule 4: silence counts only while we hear our own echo. Without one for 1.2 s we are deaf, and judge nobody; when it is back, everyone
counts as heard in that moment.
Rule 5: what the server says of a closed connection is no verdict yet: the same process may connect again, and whoever is heard is there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dcnr.bus.messages import Heartbeat, Hosted, PeerLink, PNodeInfo
from dcnr.errors import InvariantError
from dcnr.ids import PNodeId
from dcnr.orchestrator.events import Disconnected, DrainPNode, Echoed, Heard, Tick
from dcnr.orchestrator.state import PNodeRecord, PNodeState

SUSPECT_AFTER = 1.5
DEAD_AFTER = 3.0
DEAD_AFTER_CUT = 0.75
"""Seconds without a word since the connection was closed."""
DEAF_AFTER = 1.2
"""Seconds without an echo; less than any patience, so that we know ourselves first."""
FORGET_AFTER = 600.0
CUT_OFF = "its connection to the NATS server was closed, and it was not heard again"

_PRESENT = frozenset({PNodeState.ALIVE, PNodeState.SUSPECT})

TRANSITIONS: dict[PNodeState, frozenset[PNodeState]] = {
    PNodeState.ALIVE: frozenset({PNodeState.SUSPECT, PNodeState.DEAD, PNodeState.STOPPED}),
    PNodeState.SUSPECT: frozenset({PNodeState.ALIVE, PNodeState.DEAD, PNodeState.STOPPED}),
    PNodeState.DEAD: frozenset({PNodeState.ALIVE}),
    PNodeState.STOPPED: frozenset({PNodeState.ALIVE}),
}


@dataclass(frozen=True, slots=True)
class Joined:
    """This PNode can take work from now on."""

    pnode: PNodeId


@dataclass(frozen=True, slots=True)
class Gone:
    """Everything on this PNode is lost."""

    pnode: PNodeId
    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    """This PNode is to be emptied."""

    pnode: PNodeId


@dataclass(frozen=True, slots=True)
class Changed:
    """The record of a PNode is another one."""

    record: PNodeRecord


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The record of a PNode that has been gone for long is dropped."""

    pnode: PNodeId


FleetChange = Joined | Gone | Drained | Changed | Forgotten


@dataclass(slots=True)
class Member:
    """A PNode: its record, what it hosts, how it reaches its peers, and when it was last heard."""

    record: PNodeRecord
    heard: float
    hosted: tuple[Hosted, ...] = ()
    by_us: bool = True
    """False while all we know of it was written by an earlier leader."""
    links: tuple[PeerLink, ...] = ()
    cut: float | None = None
    """When its connection was closed, if it was not heard since."""

    @property
    def present(self) -> bool:
        """Whether it may still be running."""
        return self.record.state in _PRESENT

    @property
    def due(self) -> float:
        """When its silence means something."""
        due = self.heard + _patience(self.record.state)
        return due if self.cut is None else min(due, self.cut + DEAD_AFTER_CUT)


class Fleet:
    """The machine of all PNodes."""

    def __init__(self, records: tuple[PNodeRecord, ...], now: float) -> None:
        self.members = {record.info.pnode: Member(record, now, by_us=False) for record in records}
        self._echoed = now
        self._deaf = False

    @property
    def deaf(self) -> bool:
        """Whether nobody's silence meant anything at the last event."""
        return self._deaf

    def handle(self, event: Heard | Echoed | Disconnected | DrainPNode | Tick, now: float) -> list[FleetChange]:
        """Take a heartbeat, news of a connection, a drain or a deadline; a PNode's changes stand in the order in which they happened."""
        self._deaf = now > self._echoed + DEAF_AFTER
        match event:
            case Echoed():
                return self._hear_ourselves(now)
            case Disconnected(pnode):
                return self._cut(pnode, now)
            case Heard(beat):
                return self._heard(beat, now)
            case DrainPNode(_, pnode):
                return self._drain(pnode)
            case Tick():
                return [change for pnode in list(self.members) for change in self._judge(pnode, now)]

    def deadline(self) -> float | None:
        """When the next silence becomes long enough to mean something; None while we are deaf."""
        return None if self._deaf else min((member.due for member in self.members.values()), default=None)

    def present(self) -> tuple[PNodeInfo, ...]:
        """PNodes that may be running, by name."""
        return tuple(self.members[pnode].record.info for pnode in sorted(self.members) if self.members[pnode].present)

    def eligible(self) -> tuple[PNodeInfo, ...]:
        """PNodes that may take work, by name. Of their memory that counts as used which their sessions may come to need."""
        heard = (self.members[pnode] for pnode in sorted(self.members) if self.members[pnode].by_us)
        able = (member for member in heard if member.record.state is PNodeState.ALIVE and not member.record.draining)
        return tuple(replace(member.record.info, memory_used=sum(hosted.bytes for hosted in member.hosted)) for member in able)

    def validate(self) -> None:
        """Raise `InvariantError` if a record stands under another name, or if one that is gone is still to be judged."""
        for pnode, member in self.members.items():
            if member.record.info.pnode != pnode:
                raise InvariantError(f"PNode {member.record.info.pnode} is listed as {pnode}")
            if member.cut is not None and not member.present:
                raise InvariantError(f"PNode {pnode} is gone, and its closed connection still counts")

    def _hear_ourselves(self, now: float) -> list[FleetChange]:
        self._echoed = now
        if self._deaf:
            self._deaf = False
            for member in self.members.values():
                if member.present:
                    member.heard, member.cut = now, None
        return []

    def _cut(self, pnode: PNodeId, now: float) -> list[FleetChange]:
        member = self.members.get(pnode)
        if member is not None and member.present:
            member.cut = now
        return []

    def _heard(self, beat: Heartbeat, now: float) -> list[FleetChange]:
        pnode = beat.info.pnode
        member = self.members.get(pnode)
        if member is None or member.record.info.incarnation != beat.info.incarnation:
            rival = member is not None and member.present and now < member.heard + SUSPECT_AFTER
            return [] if beat.stopping or rival else self._joined(beat, now)
        if beat.stopping:
            return self._goodbye(member)
        joins = not member.by_us or not member.present
        member.heard, member.hosted, member.by_us, member.links, member.cut = now, beat.hosted, True, beat.links, None
        member.record = replace(member.record, info=beat.info)
        changes = [] if member.record.state is PNodeState.ALIVE else self._move(member, PNodeState.ALIVE, "")
        return [*changes, Joined(pnode)] if joins else changes

    def _joined(self, beat: Heartbeat, now: float) -> list[FleetChange]:
        pnode = beat.info.pnode
        old = self.members.get(pnode)
        dead = self._gone(old, PNodeState.DEAD, f"PNode {pnode} started anew as process {beat.info.pid}") if old and old.present else []
        new = self.members[pnode] = Member(PNodeRecord(beat.info, PNodeState.ALIVE), now, beat.hosted)
        return [*dead, Changed(new.record), Joined(pnode)]

    def _goodbye(self, member: Member) -> list[FleetChange]:
        if not member.present:
            return []
        return self._gone(member, PNodeState.STOPPED, f"PNode {member.record.info.pnode} was stopped")

    def _drain(self, pnode: PNodeId) -> list[FleetChange]:
        member = self.members.get(pnode)
        if member is None or not member.present or member.record.draining:
            return []
        member.record = replace(member.record, draining=True)
        return [Changed(member.record), Drained(pnode)]

    def _judge(self, pnode: PNodeId, now: float) -> list[FleetChange]:
        member = self.members[pnode]
        silent = now - member.heard
        if self._deaf or now < member.due:
            return []
        if not member.present:
            del self.members[pnode]
            return [Forgotten(pnode)]
        if now >= member.heard + DEAD_AFTER:
            return self._gone(member, PNodeState.DEAD, f"PNode {pnode} has been silent for {silent:.1f} s")
        if member.cut is not None and now >= member.cut + DEAD_AFTER_CUT:
            return self._gone(member, PNodeState.DEAD, f"PNode {pnode}: {CUT_OFF}")
        return self._move(member, PNodeState.SUSPECT, f"silent for {silent:.1f} s")

    def _gone(self, member: Member, state: PNodeState, reason: str) -> list[FleetChange]:
        member.hosted, member.cut = (), None
        return [*self._move(member, state, reason), Gone(member.record.info.pnode, reason)]

    def _move(self, member: Member, state: PNodeState, reason: str) -> list[FleetChange]:
        was = member.record.state
        if state not in TRANSITIONS[was]:
            raise InvariantError(f"PNode {member.record.info.pnode} cannot go from {was} to {state}")
        member.record = replace(member.record, state=state, reason=reason)
        return [Changed(member.record)]


def _patience(state: PNodeState) -> float:
    match state:
        case PNodeState.ALIVE:
            return SUSPECT_AFTER
        case PNodeState.SUSPECT:
            return DEAD_AFTER
        case PNodeState.DEAD | PNodeState.STOPPED:
            return FORGET_AFTER
