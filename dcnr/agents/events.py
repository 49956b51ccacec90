"""All that can happen to a PNode.

Rule 1: every result carries the (session, epoch) of its command; results of an older epoch change nothing.
Rule 2: each `Job` is answered by exactly one `JobEvent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dcnr.agents.plan import Plan
from dcnr.backends.base import Array, HostArray
from dcnr.bus.messages import CommandMessage, Deploy, Heartbeat, Hop, SavedPart, StepMessage
from dcnr.ids import Epoch, NodeId, SessionId
from dcnr.optim.decide import ScalerState, Verdict


@dataclass(frozen=True, slots=True)
class Told:
    """A control message came."""

    message: CommandMessage | StepMessage


@dataclass(frozen=True, slots=True)
class NameHeard:
    """A heartbeat under this PNode's name came: its own, or that of another process."""

    beat: Heartbeat


@dataclass(frozen=True, slots=True, eq=False)
class HopArrived:
    """A tensor came over the wire, to the host or right to the device."""

    hop: Hop
    payload: Array


@dataclass(frozen=True, slots=True)
class Prepared:
    """The part of a deploy is known."""

    deploy: Deploy
    plan: Plan


@dataclass(frozen=True, slots=True)
class Installed:
    """The part is in place. `tensors`: what it was loaded from, by canonical name; None if from the seed."""

    session: SessionId
    epoch: Epoch
    tensors: Mapping[str, HostArray] | None


@dataclass(frozen=True, slots=True)
class SetupRefused:
    """A deploy cannot be carried out here now, for a reason that is not its own. `damaged`: nobody can read the checkpoint."""

    session: SessionId
    epoch: Epoch
    reason: str
    damaged: bool


@dataclass(frozen=True, slots=True)
class SetupFailed:
    """A deploy could not be carried out: one line for the user, and the traceback for the log. `world` as in `Failed`."""

    session: SessionId
    epoch: Epoch
    message: str
    traceback: str
    world: bool


class Handoff(NamedTuple):
    """A tensor that leaves a segment: on the device, and in host memory if it goes to where devices cannot hand it over."""

    array: Array
    host: HostArray | None


@dataclass(frozen=True, slots=True, eq=False)
class PassDone:
    """`outputs` as the segment's external outputs, `losses` as (cost, loss), `gradients` as its outgoing ones.

    All are empty for a phase that did not run; losses of a step that is decided here come with `Settled`.
    """

    session: SessionId
    epoch: Epoch
    segment: int
    step: int
    micro: int
    attempt: int
    outputs: tuple[Handoff, ...]
    losses: tuple[tuple[NodeId, float], ...]
    gradients: tuple[Handoff, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Evaluated:
    """`outputs` as the segment's external outputs, `losses` as (cost, mean loss of the micro-batch)."""

    session: SessionId
    epoch: Epoch
    segment: int
    step: int
    micro: int
    attempt: int
    outputs: tuple[Handoff, ...]
    losses: tuple[tuple[NodeId, float], ...]


@dataclass(frozen=True, slots=True)
class Folded:
    """The gradients of a step: sum of squares per node with parameters, in graph order, and whether all are finite."""

    session: SessionId
    epoch: Epoch
    step: int
    attempt: int
    squared_norms: Mapping[NodeId, float]
    finite: bool


@dataclass(frozen=True, slots=True)
class Aborted:
    """What was computed of a step is forgotten."""

    session: SessionId
    epoch: Epoch
    step: int


@dataclass(frozen=True, slots=True)
class Applied:
    """A decision was carried out."""

    session: SessionId
    epoch: Epoch
    step: int


@dataclass(frozen=True, slots=True)
class Settled:
    """A step was decided and applied here. `loss_scale` is the one used in it; `losses` are (cost, micro-batch, loss)."""

    session: SessionId
    epoch: Epoch
    step: int
    verdict: Verdict
    loss_scale: float
    losses: tuple[tuple[NodeId, int, float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotTaken:
    """Canonical tensors by name, and the scaler's state after `step`."""

    session: SessionId
    epoch: Epoch
    step: int
    tensors: Mapping[str, HostArray]
    state: ScalerState


@dataclass(frozen=True, slots=True, eq=False)
class ReadDone:
    """A piece went through a segment: `outputs` as its external outputs. The rest is as in `commands.Read`."""

    session: SessionId
    epoch: Epoch
    segment: int
    slot: int
    attempt: int
    position: int
    caches: bool
    outputs: tuple[Handoff, ...]


@dataclass(frozen=True, slots=True)
class JobFailed:
    """A job raised: one line that names the node, and the traceback. `world` as in `Failed`."""

    session: SessionId
    epoch: Epoch
    message: str
    traceback: str
    world: bool


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A part of a checkpoint lies in storage."""

    session: SessionId
    epoch: Epoch
    step: int
    part: SavedPart
    state: dict[str, int | float] | None


@dataclass(frozen=True, slots=True)
class UploadFailed:
    """Storage did not take a part."""

    session: SessionId
    epoch: Epoch
    step: int
    message: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The process is asked to end."""


Sending = frozenset[tuple[SessionId, Epoch]]
"""Of which sessions tensors are on their way to other PNodes."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline passed."""

    sending: Sending = frozenset()


JobEvent = PassDone | Evaluated | Folded | Aborted | Applied | Settled | SnapshotTaken | ReadDone | JobFailed
Setup = Prepared | Installed | SetupRefused | SetupFailed
Event = Told | NameHeard | HopArrived | Setup | JobEvent | Uploaded | UploadFailed | Stop | Tick
