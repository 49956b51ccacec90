"""What the trainer sends into a graph: which slots want ids, which want targets, and the two hops of a micro-batch.

Rule 1: every fed slot of a graph has the same sequence length.
Rule 2: rows of micro-batch m of M are rows [m*B/M, (m+1)*B/M) of the batch; B % M == 0.
Rule 3: a PNode gets ids once and targets once, however many of its slots read them.

Shapes: B batch, R rows of a micro-batch, T sequence, S = T + 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dcnr.bus.messages import TRAINER, Hop, Slot
from dcnr.bus.subjects import Phase
from dcnr.errors import UserError
from dcnr.ids import Epoch, NetworkId, NodeId, PNodeId, SessionId
from dcnr.network.graph import Graph
from dcnr.nodes.base import FeedKind
from dcnr.nodes.registry import NODE_TYPES

IGNORED_TARGET = -1
"""A target below zero counts for nothing."""


@dataclass(frozen=True, slots=True)
class Feeds:
    """The fed slots of a graph, in node order, and the length of their sequences."""

    ids: tuple[Slot, ...]
    targets: tuple[Slot, ...]
    seq_len: int


@dataclass(frozen=True, slots=True)
class Address:
    """What every hop of a run has in common, and where its VNodes live."""

    network: NetworkId
    session: SessionId
    epoch: Epoch
    sender: PNodeId
    homes: dict[NodeId, PNodeId]


def feeds_of(graph: Graph) -> Feeds:
    """The slots of `graph` that are fed from outside. Raises `UserError` if it takes no sequences of ids."""
    found: dict[FeedKind, list[Slot]] = {"ids": [], "targets": []}
    lengths: dict[NodeId, int] = {}
    for node in graph.nodes:
        feeds = NODE_TYPES[node.type].feeds
        for slot, port in enumerate(node.inputs):
            kind = feeds[slot] if slot < len(feeds) else None
            if port is None and kind is not None and kind in found:
                found[kind].append((node.id, slot))
                lengths[node.id] = node.input_shapes[slot][0]
    if not found["ids"]:
        raise UserError(f"network '{graph.name}': no node takes token ids", "add an embedder that no edge leads to")
    if len(set(lengths.values())) != 1:
        each = ", ".join(f"'{node}' {length}" for node, length in lengths.items())
        raise UserError(f"network '{graph.name}' is fed sequences of different lengths: {each}", "give these nodes the same seq_len")
    return Feeds(tuple(found["ids"]), tuple(found["targets"]), next(iter(lengths.values())))


def costs_of(graph: Graph) -> tuple[NodeId, ...]:
    """The nodes that report losses, in node order."""
    declared = {sink.port.node for sink in graph.costs}
    return tuple(node.id for node in graph.nodes if node.id in declared)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step's ids and targets, int64 [B, T], how many of the targets count, and 1 / that."""

    ids_BT: np.ndarray
    targets_BT: np.ndarray
    counted: int
    weight: float


def batch_of(tokens_BS: np.ndarray) -> Batch:
    """Ids and the targets one further on."""
    targets_BT = np.ascontiguousarray(tokens_BS[:, 1:])
    counted = int(np.count_nonzero(targets_BT > IGNORED_TARGET))
    return Batch(np.ascontiguousarray(tokens_BS[:, :-1]), targets_BT, counted, 1.0 / max(1, counted))


def windows_of(tokens_BS: np.ndarray) -> Batch:
    """The same of windows of which the last may be short: -1 is no id, so where there is none the first id stands."""
    batch = batch_of(tokens_BS)
    return replace(batch, ids_BT=np.maximum(batch.ids_BT, 0))


def micro_hops(
    batch: Batch, feeds: Feeds, address: Address, step: int, attempt: int, at: tuple[int, int]
) -> list[tuple[PNodeId, Hop, np.ndarray]]:
    """The hops of micro-batch m of M = `at`, ids first: (PNode, header, payload [R, T])."""
    micro, count = at
    rows = len(batch.ids_BT) // count
    part = slice(micro * rows, (micro + 1) * rows)
    ids = _hops(address, (step, micro, attempt, 0), feeds.ids, batch.ids_BT[part], 0.0)
    return ids + _hops(address, (step, micro, attempt, 1), feeds.targets, batch.targets_BT[part], batch.weight)


def eval_hops(batch: Batch, feeds: Feeds, address: Address, at: tuple[int, int, int]) -> list[tuple[PNodeId, Hop, np.ndarray]]:
    """The hops of micro-batch `batch` of a validation, at (step, micro, attempt), ids first."""
    ids = _hops(address, (*at, 0), feeds.ids, batch.ids_BT, 0.0, "eval")
    return ids + _hops(address, (*at, 1), feeds.targets, batch.targets_BT, batch.weight, "eval")


def _hops(
    address: Address, at: tuple[int, int, int, int], slots: tuple[Slot, ...], payload_RT: np.ndarray, weight: float, phase: Phase = "fwd"
) -> list[tuple[PNodeId, Hop, np.ndarray]]:
    step, micro, attempt, source_slot = at
    by_home: dict[PNodeId, list[Slot]] = {}
    for slot in slots:
        by_home.setdefault(address.homes[slot[0]], []).append(slot)
    return [
        (
            home,
            Hop(
                address.network, address.session, address.epoch, step, micro, attempt, phase, TRAINER, source_slot, tuple(targets),
                address.sender, str(payload_RT.dtype), payload_RT.shape, weight,
            ),
            payload_RT,
        )
        for home, targets in by_home.items()
    ]  # fmt: skip
