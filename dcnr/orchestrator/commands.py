"""All that an orchestrator can do. The shell performs them in order; slow ones come back as events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from dcnr.bus.messages import Complete, Decision, Deploy, Hop, Metric, PNodeInfo, Save, SavedPart, Undeploy
from dcnr.errors import UserError
from dcnr.ids import Epoch, PNodeId, SessionId
from dcnr.orchestrator.state import Record, SessionRecord

Bucket = Literal["dcnr_networks", "dcnr_sessions", "dcnr_assignments", "dcnr_fleet"]


@dataclass(frozen=True, slots=True)
class Publish:
    """Send a control message."""

    subject: str
    message: Deploy | Undeploy | Save | Decision | Complete


@dataclass(frozen=True, slots=True, eq=False)
class SendHop:
    """Send ids or targets to the PNode that hosts `hop.targets`; hops to one PNode keep their order."""

    to: PNodeId
    hop: Hop
    payload: np.ndarray


@dataclass(frozen=True, slots=True)
class SetPeers:
    """These PNodes are there: whom hops may go to."""

    peers: tuple[PNodeInfo, ...]


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Read the ids of a step; answered by `BatchRead` or `BatchFailed`."""

    session: SessionId
    epoch: Epoch
    dataset: str
    seed: int
    step: int
    batch: int
    seq_len: int


@dataclass(frozen=True, slots=True)
class ReadWindows:
    """Read micro-batch `micro` of a validation of the state after `step`: `rows` windows. Answered by `WindowsRead` or `BatchFailed`."""

    session: SessionId
    epoch: Epoch
    dataset: str
    step: int
    micro: int
    rows: int
    seq_len: int


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """All parts of a checkpoint are in storage: make it complete. Answered by `ManifestWritten` or `ManifestFailed`.

    `kernel` says what computed it.
    """

    record: SessionRecord
    step: int
    kernel: str
    parts: tuple[SavedPart, ...]
    scaler: dict[str, int | float]


@dataclass(frozen=True, slots=True)
class Prune:
    """Remove checkpoints of these steps from storage, manifests first; parts that have no manifest too. What fails is logged."""

    session: SessionId
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """A row for whoever watches, and for the history."""

    metric: Metric


@dataclass(frozen=True, slots=True)
class Store:
    """Write a record."""

    record: Record


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove a record."""

    bucket: Bucket
    key: str


@dataclass(frozen=True, slots=True)
class Erase:
    """Remove a deleted session's checkpoints and history, as `request` asked. Answered by `Erased`."""

    request: int
    session: SessionId


@dataclass(frozen=True, slots=True)
class Spoke:
    """There is news of a request for text."""

    id: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A user's request was taken, or refused with `error`."""

    request: int
    error: UserError | None = None


Command = Publish | SendHop | SetPeers | ReadBatch | ReadWindows | WriteManifest | Prune | Measured | Store | Drop | Erase | Spoke | Answer
