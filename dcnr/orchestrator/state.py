"""What a leader must remember: one frozen record per thing, each one value of a key-value bucket.

Rule 1: a change is a new record; `store` writes it when a state changes or a checkpoint is complete, never per step.
Rule 2: a new leader needs nothing but these records and the heartbeats it hears.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from dcnr.bus.messages import PNodeInfo
from dcnr.ids import Epoch, NetworkId, PNodeId, SessionId


class PNodeState(StrEnum):
    """How sure we are of a PNode."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    STOPPED = "stopped"


class SessionState(StrEnum):
    """Where a session stands."""

    CREATED = "created"
    WAITING = "waiting"
    DEPLOYING = "deploying"
    RUNNING = "running"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    DONE = "done"
    FAILED = "failed"


NEVER = Epoch(0)
"""The epoch of a session that was never deployed."""
ACTIVE = frozenset({SessionState.DEPLOYING, SessionState.RUNNING, SessionState.SUSPENDING})
"""States in which PNodes hold parts of the session."""


@dataclass(frozen=True, slots=True)
class NetworkRecord:
    """A registered network. `revision` counts its replacements from 1."""

    name: NetworkId
    file: str
    file_name: str
    vnodes: int
    parameters: int
    revision: int = 1


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A complete checkpoint: the storage key of its manifest, and the fields of the `ScalerState` after `step`."""

    step: int
    key: str
    scaler: dict[str, int | float]


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One training run. `network_file` is the text it was created with, so that replacing a network changes no session.

    `step` and `loss` are as of the last write; `pnodes` is how many PNodes to use, 0 for all. `fault`: it is suspended, and nobody asked.
    """

    session: SessionId
    network: NetworkId
    network_file: str
    file_name: str
    dataset: str
    steps: int
    batch: int
    micro_batches: int
    seed: int
    hyper: dict[str, str | int | float | bool | None]
    fuse: bool
    pnodes: int
    state: SessionState = SessionState.CREATED
    reason: str = ""
    epoch: Epoch = NEVER
    step: int = 0
    loss: float | None = None
    checkpoints: tuple[CheckpointRecord, ...] = field(default=())
    fault: bool = False

    @property
    def newest(self) -> CheckpointRecord | None:
        """The checkpoint a resume starts from; None for the seed."""
        return max(self.checkpoints, key=lambda checkpoint: checkpoint.step, default=None)


@dataclass(frozen=True, slots=True)
class AssignmentRecord:
    """Where the VNodes of a session's prepared graph live in `epoch`."""

    session: SessionId
    epoch: Epoch
    nodes: dict[str, PNodeId]


@dataclass(frozen=True, slots=True)
class PNodeRecord:
    """A PNode that was ever heard. `draining`: it gets no new work."""

    info: PNodeInfo
    state: PNodeState
    reason: str = ""
    draining: bool = False


Record = NetworkRecord | SessionRecord | AssignmentRecord | PNodeRecord


@dataclass(frozen=True, slots=True)
class Records:
    """All of them, as a new leader reads them."""

    networks: tuple[NetworkRecord, ...] = ()
    sessions: tuple[SessionRecord, ...] = ()
    assignments: tuple[AssignmentRecord, ...] = ()
    pnodes: tuple[PNodeRecord, ...] = ()


def key_of(record: Record) -> str:
    """The record's key in its bucket."""
    match record:
        case NetworkRecord():
            return record.name
        case SessionRecord() | AssignmentRecord():
            return record.session
        case PNodeRecord():
            return record.info.pnode


def after_restart(record: SessionRecord) -> SessionRecord:
    """What a new leader makes of a session that was under way when its orchestrator went: suspended, ready to resume.

    The epoch grows by one, because the old leader may have sent a deploy of the next epoch that it no longer could write down.
    """
    if record.state not in ACTIVE and record.state is not SessionState.WAITING:
        return record
    step = record.newest.step if record.newest else 0
    reason = f"the orchestrator stopped while it was {record.state}; its last checkpoint is of step {step}, and resume goes on from there"
    return replace(record, state=SessionState.SUSPENDED, reason=reason, step=step, epoch=Epoch(record.epoch + 1), fault=True)
