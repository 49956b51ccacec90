"""Where a session's nodes go, and what a deployment of it is told.

Rule 1: a first start, and a resume that somebody asks for, wait for as many PNodes as the session wants. A recovery uses what is there.
Rule 2: a recovery moves as little as it can, and avoids PNodes that just failed if it fits without them.
Rule 3: of PNodes beyond those that take part already, the roomiest are taken first.
Rule 4: a deployment starts from the newest checkpoint; without any, from the seed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from dcnr.bus.messages import Deploy, PNodeInfo
from dcnr.errors import DoesNotFit
from dcnr.ids import NodeId, PNodeId
from dcnr.metrics.peak import peak_share
from dcnr.network.graph import Graph
from dcnr.optim.decide import ScalerState, initial_state
from dcnr.optim.hyper import Hyper
from dcnr.orchestrator.feed import Address, costs_of, feeds_of
from dcnr.orchestrator.state import AssignmentRecord, SessionRecord
from dcnr.orchestrator.trainer import Plan, scaler_fields, scaler_of
from dcnr.placement.again import place_again
from dcnr.placement.assignment import Assignment
from dcnr.placement.place import Host, place
from dcnr.placement.segments import cut_segments


def homes_for(
    graph: Graph, record: SessionRecord, offered: Sequence[PNodeInfo], previous: Mapping[NodeId, PNodeId], avoid: Collection[PNodeId] = ()
) -> Assignment:
    """Where the nodes of a session that waits go. `previous`: where they were, if that counts. Raises `DoesNotFit` that says for what."""
    if len(offered) < record.pnodes and not record.recovers:
        wanted = f"{record.pnodes} PNode{'s' * (record.pnodes > 1)}"
        raise DoesNotFit(f"it needs {wanted} and {len(offered)} can take work; start one with `dcnr-agent`")
    if not offered:
        raise DoesNotFit("it needs 1 PNode and 0 can take work; start one with `dcnr-agent`")
    others = [info for info in offered if info.pnode not in avoid]
    if others and len(others) < len(offered) and (record.recovers or len(others) >= record.pnodes):
        try:
            return _homes(graph, record, others, previous)
        except DoesNotFit:
            pass  # then with them
    try:
        return _homes(graph, record, offered, previous)
    except DoesNotFit:
        if not previous:
            raise
        return _homes(graph, record, offered, {})  # who takes part already may be too small for the number that is wanted


def _homes(graph: Graph, record: SessionRecord, offered: Sequence[PNodeInfo], previous: Mapping[NodeId, PNodeId]) -> Assignment:
    here = set(previous.values())
    hosts = [Host(info.pnode, max(0, info.memory_total - info.memory_used), info.cores) for info in offered]
    hosts.sort(key=lambda host: (host.pnode not in here, -host.memory_free, host.pnode))
    wanted, rows = hosts[: record.pnodes or None], record.batch // record.micro_batches
    return place_again(graph, wanted, rows, previous) if record.recovers else place(graph, wanted, rows)


def divided_anew(
    graph: Graph, record: SessionRecord, offered: Sequence[PNodeInfo], homes: Mapping[NodeId, PNodeId], avoid: Collection[PNodeId] = ()
) -> Assignment | None:
    """How a running session would be divided if it began now; None if as it is, or if it would not fit."""
    try:
        anew = homes_for(graph, replace(record, recovers=True), offered, {}, avoid)
    except DoesNotFit:
        return None
    return anew if dict(anew) != homes else None


def wider(
    graph: Graph, record: SessionRecord, offered: Sequence[PNodeInfo], homes: Mapping[NodeId, PNodeId], avoid: Collection[PNodeId] = ()
) -> Assignment | None:
    """The same over more PNodes than now; None if it has as many as it wants, or can use no more, or one of its own is not offered."""
    here = set(homes.values())
    if len(here) >= (record.pnodes or len(offered)) or not here < {info.pnode for info in offered}:
        return None
    stay = [info for info in offered if info.pnode in here]
    more = [info for info in offered if info.pnode not in here and info.pnode not in avoid]
    more.sort(key=lambda info: (info.memory_used - info.memory_total, info.pnode))
    anew = divided_anew(graph, record, (stay + more)[: record.pnodes or None], homes, avoid)
    return anew if anew is not None and len(anew.pnodes) > len(here) else None


def plan_of(record: SessionRecord, graph: Graph, homes: Mapping[NodeId, PNodeId], me: PNodeId, peers: Sequence[PNodeInfo] = ()) -> Plan:
    """What the trainer needs to know of a deployment in the record's epoch."""
    here = set(homes.values())
    return Plan(
        address=Address(record.network, record.session, record.epoch, me, dict(homes)),
        feeds=feeds_of(graph),
        order=tuple(node.id for node in graph.nodes),
        costs=costs_of(graph),
        hyper=Hyper.model_validate(record.hyper),
        dataset=record.dataset,
        seed=record.seed,
        steps=record.steps,
        batch=record.batch,
        micro_batches=record.micro_batches,
        window=len(cut_segments(graph, homes)) + 1,
        decides=len(here) == 1,
        peak_share=peak_share(graph, [info for info in peers if info.pnode in here]),
    )


def deploy_of(
    record: SessionRecord, graph: Graph, homes: Mapping[NodeId, PNodeId], peers: Sequence[PNodeInfo], at: tuple[str, str | None]
) -> Deploy:
    """What every PNode of the deployment is told. `at`: the storage, and what must be found there (`Deploy.probe`)."""
    storage, probe = at
    hosts = set(homes.values())
    return Deploy(
        network=record.network,
        session=record.session,
        epoch=record.epoch,
        network_file=record.network_file,
        fuse=record.fuse,
        assignment=named(homes),
        peers=tuple(info for info in peers if info.pnode in hosts),
        hyper=record.hyper,
        state=scaler_fields(scaler_at(record, graph)),
        seed=record.seed,
        total_steps=record.steps,
        micro_batches=record.micro_batches,
        batch=record.batch,
        step=record.step,
        storage=storage,
        checkpoint=record.newest.key if record.newest else None,
        decides=len(hosts) == 1,
        probe=probe,
    )


def scaler_at(record: SessionRecord, graph: Graph) -> ScalerState:
    """The state of the loss scaler at the newest checkpoint, or at the seed."""
    if record.newest is not None:
        return scaler_of(record.newest.scaler)
    float16 = any("float16" in (node.param_precision, node.activation_precision) for node in graph.nodes)
    return initial_state(Hyper.model_validate(record.hyper), float16)


def named(homes: Mapping[NodeId, PNodeId]) -> dict[str, PNodeId]:
    """An assignment as it travels."""
    return {str(node): pnode for node, pnode in homes.items()}


def homes_in(assignment: AssignmentRecord | None, graph: Graph | None) -> dict[NodeId, PNodeId]:
    """The same of a stored one; empty if there is none, or if the nodes of the graph are others by now."""
    if assignment is None or graph is None:
        return {}
    homes = {NodeId(node): pnode for node, pnode in assignment.nodes.items()}
    return homes if homes.keys() == graph.by_id.keys() else {}
