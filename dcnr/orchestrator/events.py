"""All that can happen to an orchestrator.

Rule 1: what a user asks carries the number of the request; the machine answers it with `commands.Answer`.
Rule 2: slow work (graphs, manifests, datasets) is done before an event is made, or is a command whose result is an event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dcnr.bus.messages import Heartbeat, Hop, Hosted, PNodeInfo, Report
from dcnr.ids import Epoch, NetworkId, PNodeId, SessionId
from dcnr.network.graph import Graph
from dcnr.orchestrator.sampling import Sampling
from dcnr.orchestrator.source import Source
from dcnr.orchestrator.state import CheckpointRecord, NetworkRecord, SessionRecord


@dataclass(frozen=True, slots=True)
class Heard:
    """A heartbeat came."""

    beat: Heartbeat


@dataclass(frozen=True, slots=True)
class Echoed:
    """What we sent to ourselves came back: our own way to the server works."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The server says that the control connection of `pnode` was closed."""

    pnode: PNodeId


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a session stands on a PNode, as its heartbeat says; None if the PNode does not host it."""

    info: PNodeInfo
    hosted: Hosted | None


@dataclass(frozen=True, slots=True)
class Reported:
    """A PNode says something about a session."""

    report: Report


@dataclass(frozen=True, slots=True, eq=False)
class BatchRead:
    """The ids of a step: `tokens_BS` int64 [batch, sequence + 1]."""

    session: SessionId
    epoch: Epoch
    step: int
    tokens_BS: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class WindowsRead:
    """The ids of a micro-batch of a validation: `tokens_BS` int64 [rows, sequence + 1], -1 where the split has ended.

    `windows` and `bytes_per_token` are those of the whole split.
    """

    session: SessionId
    epoch: Epoch
    step: int
    micro: int
    windows: int
    bytes_per_token: float
    tokens_BS: np.ndarray


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """The ids of a step, or of a validation after it, could not be read."""

    session: SessionId
    epoch: Epoch
    step: int
    message: str


@dataclass(frozen=True, slots=True)
class ManifestWritten:
    """A checkpoint is complete."""

    session: SessionId
    epoch: Epoch
    checkpoint: CheckpointRecord


@dataclass(frozen=True, slots=True)
class ManifestFailed:
    """Storage would not take the manifest of a checkpoint."""

    session: SessionId
    epoch: Epoch
    step: int
    message: str


@dataclass(frozen=True, slots=True)
class Erased:
    """The files of a deleted session are gone; `message` says why some are not, if so."""

    request: int
    session: SessionId
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline passed."""


# -- what users ask --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PutNetwork:
    """Register a checked network; `replace` one of that name if there is one."""

    request: int
    record: NetworkRecord
    replace: bool


@dataclass(frozen=True, slots=True)
class DropNetwork:
    """Forget a network that no session uses."""

    request: int
    name: NetworkId


@dataclass(frozen=True, slots=True)
class CreateSession:
    """Add a checked session; `graph`, the prepared one, starts it at once; `network` is registered, or replaced, along with it."""

    request: int
    record: SessionRecord
    graph: Graph | None
    network: NetworkRecord | None = None


@dataclass(frozen=True, slots=True)
class StartSession:
    """Start a created session from its seed, or resume one from `checkpoint` (None: the seed). `steps` is a new total."""

    request: int
    session: SessionId
    graph: Graph
    checkpoint: CheckpointRecord | None = None
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class SuspendSession:
    """Stop at a checkpoint after the steps in flight."""

    request: int
    session: SessionId


@dataclass(frozen=True, slots=True)
class RebalanceSession:
    """Divide a running session anew among the PNodes that may take work, at a checkpoint that is taken for it."""

    request: int
    session: SessionId


@dataclass(frozen=True, slots=True)
class DeleteSession:
    """Forget a session that is not under way, and its checkpoints."""

    request: int
    session: SessionId


@dataclass(frozen=True, slots=True)
class DrainPNode:
    """Move everything away from a PNode and give it nothing new."""

    request: int
    pnode: PNodeId


@dataclass(frozen=True, slots=True, eq=False)
class Generate:
    """Go on from `prompt` with at most `limit` ids of `source`, until `ended` says so of those that were generated. `id` names the request.

    `caches`: what attention has of earlier positions is kept. `said`: what may be shown of what was generated, which may be all there is.
    """

    request: int
    id: str
    source: Source
    prompt: tuple[int, ...]
    sampling: Sampling
    limit: int
    caches: bool
    ended: Callable[[Sequence[int]], bool]
    said: Callable[[Sequence[int], bool], str]


@dataclass(frozen=True, slots=True)
class StopGenerating:
    """End a request for text where it is."""

    request: int
    id: str


# -- what the fleet tells the sessions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offered:
    """PNodes that may take work, by name. Of their memory that counts as used which other sessions may come to need, as last heard."""

    pnodes: tuple[PNodeInfo, ...]


@dataclass(frozen=True, slots=True)
class MakeRoom:
    """Somebody waits who may want the memory that one holds who has nothing to do."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A PNode is gone."""

    pnode: PNodeId
    reason: str


@dataclass(frozen=True, slots=True)
class Draining:
    """A PNode is to be emptied."""

    pnode: PNodeId


# -- text ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskedFor:
    """Somebody still wants to hear of a request for text."""

    id: str


@dataclass(frozen=True, slots=True, eq=False)
class LogitsRead:
    """The logits that follow a piece of a text came, under the numbers of that piece."""

    hop: Hop
    logits: np.ndarray


SessionAsk = CreateSession | StartSession | SuspendSession | RebalanceSession | DeleteSession
Ask = PutNetwork | DropNetwork | SessionAsk | DrainPNode | Generate | StopGenerating
Result = BatchRead | WindowsRead | BatchFailed | ManifestWritten | ManifestFailed
Event = Heard | Echoed | Disconnected | Reported | Result | Erased | Tick | Ask | AskedFor | LogitsRead
ReadingEvent = Generate | StopGenerating | AskedFor | Offered | MakeRoom | Lost | Draining | Standing | Tick | LogitsRead | Report
SessionEvent = Report | Result | Tick | StartSession | SuspendSession | RebalanceSession | Offered | Lost | Draining | Standing
