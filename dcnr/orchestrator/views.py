"""What the API shows of the machine's state: plain values, ready to be packed."""

from __future__ import annotations

from typing import Any

from dcnr.ids import PNodeId
from dcnr.optim.hyper import Hyper
from dcnr.orchestrator.cluster import Cluster
from dcnr.orchestrator.fleet import Member
from dcnr.orchestrator.session import Session
from dcnr.orchestrator.state import NetworkRecord
from dcnr.placement.cost import graph_costs

Row = dict[str, Any]


def cluster_info(cluster: Cluster, storage: str, version: str) -> Row:
    """The cluster in a line; `pnodes` counts those that are present."""
    present = sum(member.present for member in cluster.fleet.members.values())
    return {"version": version, "orchestrator": cluster.settings.me, "storage": storage, "pnodes": present}


def network_row(record: NetworkRecord) -> Row:
    """A network in a line."""
    return {"name": record.name, "vnodes": record.vnodes, "parameters": record.parameters, "revision": record.revision}


def session_state(session: Session) -> Row:
    """Where a session stands."""
    return {"session": session.record.session, "state": str(session.record.state)}


def session_row(session: Session) -> Row:
    """A session in a line."""
    record = session.record
    return {
        "session": record.session,
        "network": record.network,
        "dataset": record.dataset,
        "state": str(record.state),
        "step": session.step,
        "steps": record.steps,
        "loss": session.loss,
        "reason": session.reason,
    }


def session_details(session: Session) -> Row:
    """Everything about a session; `assignment` is empty while no PNode holds it, `best` is that of its validations, `kept` the step of the
    best one that has a checkpoint.
    """
    record = session.record
    known = record.validation
    return {
        **session_row(session),
        "batch": record.batch,
        "micro_batches": record.micro_batches,
        "seed": record.seed,
        "hyper": record.hyper,
        "fuse": record.fuse,
        "epoch": record.epoch,
        "assignment": dict(session.homes),
        "checkpoints": [checkpoint.step for checkpoint in record.checkpoints],
        "best": {"step": known.best_step, "loss": known.best_loss} if known else None,
        "kept": record.kept,
    }


def pnode_row(member: Member) -> Row:
    """A PNode in a line; `vnodes` and `sessions` are what it hosts by its own last word."""
    record, info = member.record, member.record.info
    return {
        "pnode": info.pnode,
        "state": str(record.state),
        "reason": record.reason or ("draining" if record.draining else ""),
        "backend": info.backend,
        "device": info.device,
        "host": info.host,
        "memory_total": info.memory_total,
        "memory_used": info.memory_used,
        "cores": info.cores,
        "vnodes": sum(hosted.vnodes for hosted in member.hosted),
        "sessions": [hosted.session for hosted in member.hosted],
        "version": info.version,
    }


def pnode_details(cluster: Cluster, pnode: PNodeId) -> Row:
    """The same, the VNodes that live there by session, with what each takes, and how large tensors go to its peers."""
    nodes = {name: [node for node, home in session.homes.items() if home == pnode] for name, session in cluster.sessions.items()}
    taken = [row for session in cluster.sessions.values() for row in _taken(session, pnode)]
    member = cluster.fleet.members[pnode]
    return {
        **pnode_row(member),
        "links": [{"peer": link.pnode, "lane": link.lane, "mb_per_s": link.mb_per_s} for link in member.links],
        "nodes": {name: hosted for name, hosted in nodes.items() if hosted},
        "memory": taken,
    }


def _taken(session: Session, pnode: PNodeId) -> list[Row]:
    """Bytes of every VNode of `session` on `pnode`, as placement counts them."""
    homes, record, graph = session.homes, session.record, session.graph
    if graph is None or pnode not in homes.values():
        return []
    shards = Hyper.model_validate(record.hyper).shards
    costs = graph_costs(graph, record.batch // record.micro_batches, shards, lambda node: homes[node.id])
    return [
        {
            "session": record.session,
            "vnode": node.id,
            "type": node.type,
            "parameter_bytes": costs[node.id].parameter_bytes,
            "optimizer_bytes": costs[node.id].optimizer_bytes,
            "activation_bytes": costs[node.id].activation_bytes,
            "recompute_bytes": costs[node.id].again_bytes,
        }
        for node in graph.nodes
        if homes[node.id] == pnode
    ]
