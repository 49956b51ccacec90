"""A checkpoint that is read: where its nodes go, and what their PNodes are told.

Rule 1: it goes to as few PNodes as hold it, the roomiest first, unless a number is asked for: every border costs each token a hop.
Rule 2: PNodes that just failed are left out if it fits without them.
Rule 3: its hops go under a name of its own, so that the VNodes of the training session never hear them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dcnr.bus.messages import Deploy, PNodeInfo
from dcnr.errors import DoesNotFit
from dcnr.ids import Epoch, NetworkId, NodeId, PNodeId, SessionId
from dcnr.network.graph import Graph
from dcnr.orchestrator.layout import named
from dcnr.placement.assignment import Assignment
from dcnr.placement.place import Host, place

SLOTS = 4
"""Sequences of one checkpoint that are read at a time; each has caches of its own. Others wait."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What is read: `key` is that of the manifest, `weights` says what is in its parts, `graph` is the one that generates; `pnodes`: how
    many to use, 0 for as few as hold it.
    """

    session: SessionId
    step: int
    key: str
    weights: str
    network_file: str
    fuse: bool
    graph: Graph
    pnodes: int = 0

    @property
    def name(self) -> SessionId:
        """Under which PNodes know it: the same for the same checkpoint, and another for what is trained anew under its name."""
        parts = (self.key, self.weights, self.network_file, str(self.fuse), str(self.pnodes))
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return SessionId(f"reading-{digest[:16]}")

    @property
    def shown(self) -> str:
        """For people."""
        return f"{self.session}@{self.step}"


def homes_to_read(source: Source, offered: Sequence[PNodeInfo], avoid: Collection[PNodeId] = ()) -> Assignment:
    """Where its nodes go. Raises `DoesNotFit` that says for what it waits."""
    wanted = source.pnodes or 1
    able = [info for info in offered if info.pnode not in avoid]
    able = able if len(able) >= wanted else list(offered)
    if len(able) < wanted:
        raise DoesNotFit(f"it needs {wanted} PNode{'s' * (wanted > 1)} and {len(able)} can take work; start one with `dcnr-agent`")
    hosts = [Host(info.pnode, max(0, info.memory_total - info.memory_used), info.cores) for info in able]
    hosts.sort(key=lambda host: (-host.memory_free, host.pnode))
    for count in range(wanted, len(hosts)) if not source.pnodes else ():
        try:
            return place(source.graph, hosts[:count], SLOTS, reads=True)
        except DoesNotFit:
            continue
    return place(source.graph, hosts[: source.pnodes or None], SLOTS, reads=True)


def deploy_to_read(
    source: Source, epoch: Epoch, homes: Mapping[NodeId, PNodeId], peers: Sequence[PNodeInfo], at: tuple[PNodeId, str, str | None]
) -> Deploy:
    """What every PNode of it is told. `at`: who gets the logits, the storage, and what must be found there."""
    reader, storage, probe = at
    hosts = set(homes.values())
    return Deploy(
        network=NetworkId(source.name),
        session=source.name,
        epoch=epoch,
        network_file=source.network_file,
        fuse=source.fuse,
        assignment=named(homes),
        peers=tuple(info for info in peers if info.pnode in hosts),
        hyper={},
        state={},
        seed=0,
        total_steps=0,
        micro_batches=1,
        batch=SLOTS,
        step=source.step,
        storage=storage,
        checkpoint=source.key,
        decides=False,
        probe=probe,
        purpose="generate",
        reader=reader,
    )
