"""What the orchestrator says of a cluster, as frozen records.

Fields that this version does not know are left out; one that is missing is an error: the orchestrator is of another version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from dcnr.errors import PeerError
from dcnr.ids import NetworkId, NodeId, PNodeId, SessionId

T = TypeVar("T")
OTHER_VERSION = "is it of the same version? see: dcnr doctor"


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """The cluster in a line. `storage`: where checkpoints are kept; `pnodes`: how many are there."""

    version: str
    orchestrator: str
    storage: str
    pnodes: int


@dataclass(frozen=True, slots=True)
class NetworkInfo:
    """A registered network. `revision` counts its replacements from 1."""

    name: NetworkId
    vnodes: int
    parameters: int
    revision: int


@dataclass(frozen=True, slots=True)
class NetworkDetails(NetworkInfo):
    """The same with its text, and what that is called in errors."""

    file: str
    file_name: str


@dataclass(frozen=True, slots=True)
class Registered:
    """A network that has just been registered."""

    name: NetworkId
    vnodes: int
    parameters: int


@dataclass(frozen=True, slots=True)
class SessionState:
    """Where a session stands: created, waiting, adopting, deploying, running, suspending, suspended, done, failed or deleted."""

    session: SessionId
    state: str


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session in a line. `step` of `steps` are done; `loss` is that of the last one; `reason` says why it is in its state."""

    session: SessionId
    network: NetworkId
    dataset: str
    state: str
    step: int
    steps: int
    loss: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class BestStep:
    """The step with the smallest validation loss of a session, in nats a token."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class SessionDetails(SessionInfo):
    """Everything about a session. `assignment`: which VNode is where, empty at rest. `checkpoints`: the steps of those that can be gone
    back to. `best`: None before the first validation. `kept`: the step of the best validation that has a checkpoint, which stays."""

    batch: int
    micro_batches: int
    seed: int
    hyper: dict[str, str | int | float | bool | None]
    fuse: bool
    epoch: int
    assignment: dict[NodeId, PNodeId]
    checkpoints: tuple[int, ...]
    best: BestStep | None
    kept: int | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint of a session: its state after `step`."""

    session: SessionId
    step: int


@dataclass(frozen=True, slots=True)
class PNodeInfo:
    """A PNode in a line. Bytes; `sessions`: those of which it hosts some of its `vnodes`."""

    pnode: PNodeId
    state: str
    reason: str
    backend: str
    device: str
    host: str
    memory_total: int
    memory_used: int
    cores: int
    vnodes: int
    sessions: tuple[SessionId, ...]
    version: str


@dataclass(frozen=True, slots=True)
class Link:
    """How large tensors go to a peer, and how fast."""

    peer: PNodeId
    lane: str
    mb_per_s: float


@dataclass(frozen=True, slots=True)
class HostedVNode:
    """What a VNode takes where it lives, in bytes."""

    session: SessionId
    vnode: NodeId
    type: str
    parameter_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    recompute_bytes: int


@dataclass(frozen=True, slots=True)
class PNodeDetails(PNodeInfo):
    """The same with its links, the names of its VNodes by session, and what each takes."""

    links: tuple[Link, ...]
    nodes: dict[SessionId, tuple[NodeId, ...]]
    memory: tuple[HostedVNode, ...]


def read(kind: type[T], answer: object) -> T:
    """The record in an answer. Raises `PeerError`."""
    return _checked(TypeAdapter(kind), kind.__name__, answer)


def read_all(kind: type[T], answer: Mapping[str, object], key: str) -> list[T]:
    """The records of a list in an answer. Raises `PeerError`."""
    adapter, found = TypeAdapter(kind), answer.get(key)
    if not isinstance(found, list):
        raise PeerError(f"the orchestrator's answer has no list '{key}'", OTHER_VERSION)
    return [_checked(adapter, kind.__name__, one) for one in found]


def _checked(adapter: TypeAdapter[T], name: str, answer: object) -> T:
    try:
        return adapter.validate_python(answer)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PeerError(f"the orchestrator's answer is no {name}: {where}: {first['msg']}", OTHER_VERSION) from error
