"""What a leader must remember: one frozen record per thing, each one value of a key-value bucket.

Rule 1: a change is a new record; `store` writes it when a state changes or a checkpoint is complete, never per step.
Rule 2: a new leader needs nothing but these records and the heartbeats it hears.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from dcnr.bus.messages import PNodeInfo
from dcnr.ids import NEVER, Epoch, NetworkId, PNodeId, SessionId


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
    ADOPTING = "adopting"
    DEPLOYING = "deploying"
    RUNNING = "running"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    DONE = "done"
    FAILED = "failed"


ACTIVE = frozenset({SessionState.ADOPTING, SessionState.DEPLOYING, SessionState.RUNNING, SessionState.SUSPENDING})
"""States in which PNodes hold parts of the session."""
UNDER_WAY = ACTIVE | {SessionState.WAITING}
"""States that a new leader has to go on from."""
_S = SessionState
TRANSITIONS: Mapping[SessionState, frozenset[SessionState]] = {
    _S.CREATED: frozenset({_S.WAITING}),
    _S.WAITING: frozenset({_S.WAITING, _S.DEPLOYING, _S.SUSPENDED, _S.DONE, _S.FAILED}),
    _S.ADOPTING: frozenset({_S.WAITING, _S.DEPLOYING, _S.RUNNING, _S.SUSPENDED, _S.DONE, _S.FAILED}),
    _S.DEPLOYING: frozenset({_S.WAITING, _S.RUNNING, _S.SUSPENDED, _S.DONE, _S.FAILED}),
    _S.RUNNING: frozenset({_S.WAITING, _S.SUSPENDING, _S.DONE, _S.FAILED}),
    _S.SUSPENDING: frozenset({_S.SUSPENDED, _S.DONE, _S.FAILED}),
    _S.SUSPENDED: frozenset({_S.WAITING, _S.DONE}),
    _S.DONE: frozenset({_S.WAITING}),
    _S.FAILED: frozenset({_S.WAITING}),
}
"""What a session may become. `orchestrator.session` says when it does."""


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
class ValidationRecord:
    """What validation has come to: all of them up to step `upto` are done, and which of them was the best.

    Those after `counted_from` count for the session's patience: it is where somebody resumed it after it had ended.
    """

    upto: int
    best_step: int
    best_loss: float
    counted_from: int = 0

    def back_to(self, step: int) -> ValidationRecord:
        """As far as it holds where the session goes back to `step`: what comes after is validated again."""
        return replace(self, upto=min(self.upto, step))

    def resumed(self, step: int, ended: bool) -> ValidationRecord | None:
        """For a session that somebody lets go on after `step`; None if the best one was after it, and so is of another run.

        One that had `ended` has new patience; one that was only suspended ends where it would have ended anyway.
        """
        known = self.back_to(step)
        return None if self.best_step > step else replace(known, counted_from=step) if ended else known


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One training run. `network_file` is the text it was created with, so that replacing a network changes no session.

    `step` is that of the newest checkpoint, 0 for the seed, and `loss` is as of the last write. `pnodes` is how many PNodes it wants, 0
    for all. `recovers`: it trained already when something went wrong, so it goes on with whatever PNodes are there.
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
    recovers: bool = False
    validation: ValidationRecord | None = None
    """None before the first."""
    kept: int | None = None
    """The step of the best validation of which there is a checkpoint: that stays until there is one of a better."""

    @property
    def newest(self) -> CheckpointRecord | None:
        """The checkpoint a resume starts from; None for the seed."""
        return max(self.checkpoints, key=lambda checkpoint: checkpoint.step, default=None)

    def with_checkpoints(self, checkpoints: tuple[CheckpointRecord, ...]) -> SessionRecord:
        """The record with these, standing at the newest."""
        steps = {checkpoint.step for checkpoint in checkpoints}
        best = self.validation.best_step if self.validation else None
        kept = next((step for step in (best, self.kept) if step in steps), None)
        return replace(self, checkpoints=checkpoints, step=max(steps, default=0), kept=kept)

    def with_validation(self, known: ValidationRecord | None) -> SessionRecord:
        """The record with what validation has come to."""
        return replace(self, validation=known).with_checkpoints(self.checkpoints)

    def standing_at(self, step: int) -> SessionRecord:
        """As it goes on where PNodes have done `step`. If that is the best one and there is no checkpoint of it, it is validated again, so
        that one is asked for again.
        """
        known = self.validation
        if known is None or not known.best_step == known.upto == step or self.kept == step:
            return self
        return self.with_validation(known.back_to(step - 1))


@dataclass(frozen=True, slots=True)
class AssignmentRecord:
    """Where the VNodes of a session's prepared graph live in `epoch`, which began after `step`."""

    session: SessionId
    epoch: Epoch
    nodes: dict[str, PNodeId]
    step: int = 0


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
