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
from dcnr.bus.messages import CommandMessage, Decision, Deploy, Heartbeat, Hop, SavedPart
from dcnr.ids import Epoch, NodeId, SessionId
from dcnr.optim.decide import ScalerState, Verdict


@dataclass(frozen=True, slots=True)
class Told:
    """A control message came."""

    message: CommandMessage | Decision


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
    """The part is in place."""

    session: SessionId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class SetupFailed:
    """A deploy could not be carried out: one line for the user, and the traceback for the log."""

    session: SessionId
    epoch: Epoch
    message: str
    traceback: str


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
    outputs: tuple[Handoff, ...]
    losses: tuple[tuple[NodeId, float], ...]
    gradients: tuple[Handoff, ...]


@dataclass(frozen=True, slots=True)
class Folded:
    """The gradients of a step: sum of squares per node with parameters, in graph order, and whether all are finite."""

    session: SessionId
    epoch: Epoch
    step: int
    squared_norms: Mapping[NodeId, float]
    finite: bool


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


@dataclass(frozen=True, slots=True)
class JobFailed:
    """A job raised: one line that names the node, and the traceback."""

    session: SessionId
    epoch: Epoch
    message: str
    traceback: str


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
    traceback: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The process is asked to end."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline passed."""


JobEvent = PassDone | Folded | Applied | Settled | SnapshotTaken | JobFailed
Event = Told | NameHeard | HopArrived | Prepared | Installed | SetupFailed | JobEvent | Uploaded | UploadFailed | Stop | Tick
