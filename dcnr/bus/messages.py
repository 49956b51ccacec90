"""The one vocabulary of the wire. All that orchestrator and agents share is here.

A message is a frozen slotted dataclass; `codec` turns it into msgpack `[type name, fields]` and back, checking every field.
Any message may be lost, repeated or late: receivers are idempotent, and senders of what must arrive repeat it until they see its effect.
`(session, epoch)` stands in everything that belongs to a run; an older epoch is dropped and counted.

A training step, seen from the wire:

1. trainer -> `Hop` (fwd, source `trainer`) with ids to each embedder and targets to each cost, micro-batch by micro-batch
2. PNode -> PNode `Hop` fwd and bwd between segments
3. cost's PNode -> `Loss` per micro-batch
4. each PNode -> `StepReport` when its last backward of the step is done; repeated until the decision comes
5. trainer -> `Decision` on the network's step subject; PNodes apply or skip; a PNode that reports a decided step gets the decision again
6. where one PNode holds the whole network (`Deploy.decides`), it decides itself by the same function and sends `StepDone` instead of 3 to 5
7. after a step whose decision says so, and on `Save`, each PNode copies its part, uploads it in the background and sends `Saved` (or
   `SaveFailed`, and training goes on); `Complete` says that a checkpoint exists, so that PNodes keep the copy to go back to
8. a step that lost a message is fed again with `attempt` + 1: a PNode that hears of a newer attempt forgets what it has of the older one
9. between two steps, trainer -> `Hop` (eval) with ids and targets of the validation split, forward only; cost's PNode -> `EvalLoss`
10. whatever else goes wrong: `Deploy` with a newer epoch, from the newest checkpoint; a PNode goes back to its own copy where it has one

Text, seen from the wire (`Deploy.purpose` is `generate`; forward hops only):

1. orchestrator -> `Hop` (source `trainer`) with a piece of a sequence, ids [1, n], to each embedder: `micro` is the slot of the sequence,
   `step` the position of the first id. A piece at position 0 begins an `attempt`, and makes all older ones of its slot nothing
2. PNode -> PNode `Hop` between segments, under the same three numbers
3. the PNode of the logits -> `Hop` to `Deploy.reader`, who picks the next id: that is the next piece. A lost message: the sequence is read
   anew from position 0, as the next attempt
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dcnr.bus.subjects import Phase
from dcnr.ids import NEVER, Epoch, NetworkId, NodeId, PNodeId, SessionId

VERSION = 1
TRAINER = NodeId("trainer")
"""`Hop.source` of ids and targets. No node of a file may have this name."""

WITH_DEVICE = "cupy"
"""`PNodeInfo.backend` of those whose tensors lie on a device that other processes of the host can open."""

Slot = tuple[NodeId, int]
Address = tuple[str, int]
"""Host and port of TCP."""


@dataclass(frozen=True, slots=True)
class Hop:
    """Header of one tensor. fwd: an activation for the input slots `targets`. bwd: a gradient for the output slots `targets`.
    eval: as fwd, of a validation of the state after `step`; `micro` and `attempt` are those of the validation.

    A gradient is of one use: `source`, `source_slot` is the input slot that read the activation, and the receiver adds the gradients of
    all uses in node order. Only where all uses of an output are in one segment, their sum comes, named after the first of them.
    `transfer` numbers this sender's transfers. `lane` says where the payload is, `codec` what it looks like there (`bus.wire`); `nbytes`
    are those of the payload, `dtype` and `shape` those of the tensor.
    """

    network: NetworkId
    session: SessionId
    epoch: Epoch
    step: int
    micro: int
    attempt: int
    phase: Phase
    source: NodeId
    source_slot: int
    targets: tuple[Slot, ...]
    sender: PNodeId
    dtype: str
    shape: tuple[int, ...]
    weight: float = 0.0
    """Targets only: 1 / counted targets of the whole step, or, in a validation, of this micro-batch."""
    codec: str = "raw"
    lane: str = "inline"
    transfer: int = 0
    nbytes: int = 0
    checksum: int = 0
    version: int = VERSION
    caches: bool = False
    """Generation: keys and values of this attempt are kept, so that its next piece may begin at the next position."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of transfer (`sender`, `transfer`) of `nbytes` bytes: those from `offset` follow. It may come before the `Hop`."""

    sender: PNodeId
    transfer: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Credit:
    """Receiver to sender: everything of `transfer` below byte `received` has been taken; -1 refuses this lane for good."""

    receiver: PNodeId
    transfer: int
    received: int


@dataclass(frozen=True, slots=True)
class Meet:
    """PNode to PNode, question and answer: connect to me at one of `addresses`; `token` (hex) lets you in, once and soon.

    `connected` (in an answer): that has just happened the other way round.
    """

    pnode: PNodeId
    addresses: tuple[Address, ...]
    token: str
    encrypted: bool
    connected: bool = False


@dataclass(frozen=True, slots=True)
class PNodeInfo:
    """What a PNode is. `incarnation` changes with every start of the process; `host` is equal for processes that share memory.

    Bytes: `memory_total` is what it may hold, `memory_used` what its backend holds now, measured.
    """

    pnode: PNodeId
    incarnation: str
    host: str
    backend: str
    device: str
    memory_total: int
    memory_used: int
    cores: int
    pid: int
    version: str


@dataclass(frozen=True, slots=True)
class Hosted:
    """One session on a PNode: where it stands.

    `step`: the last one decided here, `last` its decision (None before the first of this epoch); `attempt`: the largest of undecided
    steps and of a validation.
    `work` counts the jobs done since the deploy. `busy`: it has something to compute or to send, so that silence is no standstill.
    """

    session: SessionId
    epoch: Epoch
    step: int
    vnodes: int
    bytes: int
    attempt: int = 0
    work: int = 0
    busy: bool = False
    last: Decision | None = None


@dataclass(frozen=True, slots=True)
class PeerLink:
    """How large tensors of a PNode go to a peer: over which lane, and how fast, in measured MB/s (0: none went there yet)."""

    pnode: PNodeId
    lane: str
    mb_per_s: float


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Every 0.5 s, with everything a leader needs to know a PNode it never heard of. `stopping` says good-bye.

    `age`: seconds since the process started. Of two processes with one name, the younger one gives way when it hears the other.
    `links`: one for each peer of its sessions.
    """

    info: PNodeInfo
    hosted: tuple[Hosted, ...]
    stopping: bool = False
    age: float = 0.0
    links: tuple[PeerLink, ...] = ()


# -- orchestrator to PNode -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deploy:
    """Host your part of this session. Idempotent per (session, epoch); answered by `Deployed` or `Refused`.

    Everyone runs the same pure passes over the same file, so no fused graph travels. `network_file` is the YAML text; `fuse` whether
    optional passes run.
    `checkpoint`: storage key of the manifest to load from; None starts from the seed. `step`: optimizer steps already done.
    `hyper`: fields of `optim.hyper.Hyper`. `state`: fields of `optim.decide.ScalerState`.
    `probe`: a blob that must be in `storage`, as seen from the PNode; None where storage cannot differ from host to host.
    `purpose`: to generate, weights alone are loaded, `batch` sequences have a slot each, and `reader` gets the logits.
    """

    network: NetworkId
    session: SessionId
    epoch: Epoch
    network_file: str
    fuse: bool
    assignment: dict[str, PNodeId]
    peers: tuple[PNodeInfo, ...]
    hyper: dict[str, str | int | float | bool | None]
    state: dict[str, int | float]
    seed: int
    total_steps: int
    micro_batches: int
    batch: int
    step: int
    storage: str
    checkpoint: str | None
    decides: bool
    probe: str | None = None
    purpose: Literal["train", "generate"] = "train"
    reader: PNodeId | None = None


@dataclass(frozen=True, slots=True)
class Undeploy:
    """Let go of a session: memory, subscriptions, work in hand."""

    session: SessionId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Save:
    """Upload your part of the state after `step` (nothing is in flight). Answered by `Saved`; idempotent."""

    session: SessionId
    epoch: Epoch
    step: int


@dataclass(frozen=True, slots=True)
class Complete:
    """Checkpoint `step` is complete: its copy is what a rollback goes to, older ones are of no use any more."""

    session: SessionId
    epoch: Epoch
    step: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Apply or skip step `step`; all that is known of it, so that another leader can go on from here.

    `state`: fields of the `ScalerState` after it. `loss_scale`: the one used in it. `save`: copy and upload the state after it.
    """

    session: SessionId
    epoch: Epoch
    step: int
    skip: bool
    lr: float
    lr_factor: float
    """Schedule only: multiplies a node's own learning_rate."""
    grad_factor: float
    """Clip factor / loss scale."""
    loss: float
    grad_norm: float
    loss_scale: float
    state: dict[str, int | float]
    save: bool = False


# -- PNode to orchestrator -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deployed:
    """The part is in place, at `step`."""

    pnode: PNodeId
    session: SessionId
    epoch: Epoch
    step: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The part does not fit or cannot run here now; `reason` has the numbers. `damaged`: the checkpoint cannot be read by anyone."""

    pnode: PNodeId
    session: SessionId
    epoch: Epoch
    reason: str
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class Loss:
    """Weighted loss of one micro-batch at one cost. Their sum over micro-batches, in order, is the step's loss."""

    pnode: PNodeId
    session: SessionId
    epoch: Epoch
    step: int
    attempt: int
    cost: NodeId
    micro: int
    loss: float


@dataclass(frozen=True, slots=True)
class EvalLoss:
    """Mean loss of one micro-batch of a validation at one cost, of the state after `step`. The same in every attempt."""

    pnode: PNodeId
    session: SessionId
    epoch: Epoch
    step: int
    cost: NodeId
    micro: int
    loss: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """All backwards of a step are done here. `losses` lists (cost, micro, loss) again, since a `Loss` may be lost."""

    pnode: PNodeId
    session: SessionId
    epoch: Epoch
    step: int
    attempt: int
    squared_norms: dict[str, float]
    finite: bool
    losses: tuple[tuple[NodeId, int, float], ...]


@dataclass(frozen=True, slots=True)
class StepDone:
    """A PNode that decides for itself finished a step. `state`: the `ScalerState` after it."""

    pnode: PNodeId
    session: SessionId
    epoch: Epoch
    step: int
    loss: float
    grad_norm: float
    skipped: bool
    lr: float
    loss_scale: float
    state: dict[str, int | float]


@dataclass(frozen=True, slots=True)
class SavedPart:
    """One file of a checkpoint: storage key, sha256 hex, size in bytes, and the canonical tensors in it."""

    key: str
    sha256: str
    bytes: int
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """This PNode's part of checkpoint `step` lies in storage. `state`: `ScalerState` after it, if this PNode decides."""

    pnode: PNodeId
    session: SessionId
    epoch: Epoch
    step: int
    part: SavedPart
    state: dict[str, int | float] | None


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """Storage did not take this PNode's part of checkpoint `step`. Training goes on; `Save` tries again."""

    pnode: PNodeId
    session: SessionId
    epoch: Epoch
    step: int
    message: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Something broke in this session here: one line for the user, and the traceback for the log.

    `world`: it was the machine or the network, so that the same work may succeed elsewhere or later.
    """

    pnode: PNodeId
    session: SessionId
    epoch: Epoch
    message: str
    traceback: str
    world: bool = False


# -- orchestrator to itself ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Echo:
    """What a leader sends to itself over the server: only while it hears these does the silence of others mean anything."""

    sender: PNodeId
    number: int


# -- metrics ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One row of a training log. `lr`, `loss_scale`: those used in this step. `step` counts from 1.

    A step that was rolled back comes again, with a larger `epoch`: that row stands in place of the older one.
    `mfu`: operations of the network per second, as a share of what the devices could do at most; None where that is not known.
    """

    session: SessionId
    step: int
    loss: float
    lr: float
    grad_norm: float
    loss_scale: float
    skipped: bool
    tokens_per_s: float
    step_ms: float
    epoch: Epoch = NEVER
    mfu: float | None = None


@dataclass(frozen=True, slots=True)
class ValidationMetrics:
    """The state after `step`, on the validation split: mean loss over `tokens` targets. `best`: all validations before had a larger one.

    One that was rolled back comes again, with a larger `epoch`: that row stands in place of the older one.
    """

    session: SessionId
    step: int
    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    best: bool
    epoch: Epoch = NEVER


@dataclass(frozen=True, slots=True)
class SessionMetrics:
    """A session changed its state. `reason` says why in words."""

    session: SessionId
    state: str
    step: int
    reason: str


CommandMessage = Deploy | Undeploy | Save
StepMessage = Decision | Complete
"""On the step subject of a network."""
Metric = StepMetrics | SessionMetrics | ValidationMetrics
Report = Deployed | Refused | Loss | EvalLoss | StepReport | StepDone | Saved | SaveFailed | Failed
Message = Hop | Chunk | Credit | Meet | Heartbeat | Echo | CommandMessage | StepMessage | Report | Metric
