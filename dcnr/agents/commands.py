"""All that a PNode can do. The shell performs them in order; slow ones come back as events.

A `Job` goes to the compute thread, which does one after the other in the order given and answers each with one event. So whatever a
job needs only has to be queued before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dcnr.agents.plan import Plan
from dcnr.backends.base import Array, HostArray
from dcnr.bus.messages import Decision, Deploy, Hop, Hosted, PNodeInfo, Report
from dcnr.ids import Epoch, NetworkId, PNodeId, SessionId

Tensors = Mapping[str, HostArray]
"""By canonical name."""


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """Forward, backward or (where nothing is to wait for in between) both, of one micro-batch through one segment. Answered by `PassDone`.

    `inputs` as the segment's external inputs, None for no forward; `weights` as these: what came with targets, else 0.
    `gradients` as its incoming gradients, None for no backward.
    """

    session: SessionId
    epoch: Epoch
    segment: int
    step: int
    micro: int
    inputs: tuple[Array, ...] | None
    weights: tuple[float, ...]
    gradients: tuple[Array, ...] | None
    attempt: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Evaluate:
    """Forward, without dropout and without keeping anything, of one micro-batch of a validation through one segment.

    Answered by `Evaluated`. `inputs` and `weights` as in `Pass`.
    """

    session: SessionId
    epoch: Epoch
    segment: int
    step: int
    micro: int
    inputs: tuple[Array, ...]
    weights: tuple[float, ...]
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Fold:
    """All backwards of a step are queued: fold the gradients, measure them. Answered by `Folded`."""

    session: SessionId
    epoch: Epoch
    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget all that was computed of the undecided `step`: it begins anew. Answered by `Aborted`."""

    session: SessionId
    epoch: Epoch
    step: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Do what was decided of a folded step. Answered by `Applied`."""

    session: SessionId
    epoch: Epoch
    decision: Decision


@dataclass(frozen=True, slots=True)
class Settle:
    """Fold, decide and apply at once, where the whole network is here. Answered by `Settled`."""

    session: SessionId
    epoch: Epoch
    step: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copy the state after `step` to host memory. Answered by `SnapshotTaken`."""

    session: SessionId
    epoch: Epoch
    step: int


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """A piece of the sequence in `slot`, from `position` on, goes forward through a segment. Answered by `ReadDone`.

    `inputs` as the segment's external inputs. `caches`: keys and values are read and kept.
    """

    session: SessionId
    epoch: Epoch
    segment: int
    slot: int
    attempt: int
    position: int
    caches: bool
    inputs: tuple[Array, ...]


Job = Pass | Evaluate | Fold | Abort | Apply | Settle | Snapshot | Read


@dataclass(frozen=True, slots=True)
class Prepare:
    """Look for the storage of a deploy, read its network, find this PNode's part.

    Answered by `Prepared`, `SetupRefused` or `SetupFailed`.
    """

    deploy: Deploy


@dataclass(frozen=True, slots=True)
class Install:
    """Subscribe, make the arrays, load or initialise them. Answered by `Installed`, `SetupRefused` or `SetupFailed`.

    `kept`: what is in memory of the state to begin with, by canonical name; only the rest is read from storage.
    """

    deploy: Deploy
    plan: Plan
    kept: Tensors


@dataclass(frozen=True, slots=True)
class Evict:
    """Let go of a session: subscriptions, arrays, whatever is queued. No answer."""

    session: SessionId
    epoch: Epoch


@dataclass(frozen=True, slots=True, eq=False)
class SendHop:
    """Send a tensor, of the device or of the host, to another PNode."""

    to: PNodeId
    hop: Hop
    payload: Array


@dataclass(frozen=True, slots=True)
class SendReport:
    """Tell the orchestrator."""

    network: NetworkId
    report: Report


@dataclass(frozen=True, slots=True, eq=False)
class Upload:
    """Put this PNode's part of a checkpoint into storage, in the background. Answered by `Uploaded` or `UploadFailed`."""

    session: SessionId
    epoch: Epoch
    step: int
    storage: str
    tensors: Tensors
    state: dict[str, int | float] | None
    """Comes back with `Uploaded`."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Send a heartbeat; the shell adds what the process is."""

    hosted: tuple[Hosted, ...]
    stopping: bool
    age: float


@dataclass(frozen=True, slots=True)
class GiveWay:
    """The name belongs to `other`: end with an error, once the good-bye is said."""

    other: PNodeInfo


Command = Job | Prepare | Install | Evict | SendHop | SendReport | Upload | Beat | GiveWay
