"""Every subject of the protocol, built here and nowhere else. Ids obey `ids.ID_RULE`, so a subject never has a stray dot."""

from __future__ import annotations

from typing import Literal

from dcnr.ids import NetworkId, NodeId, PNodeId, SessionId

Phase = Literal["fwd", "bwd", "eval"]
MetricKind = Literal["step", "session", "validation", "pnode", "log"]

HEARTBEATS = "dcnr.pnode.*.heartbeat"
REPORTS = "dcnr.net.*.report"
METRICS = "dcnr.metrics.>"
ANY_NETWORK = NetworkId("*")
"""Of a subscription to hops: those of every network."""
DISCONNECTS = "dcnr.server.disconnect"
"""The server's own news of closed connections, where its configuration grants them."""


def hop(network: NetworkId, node: NodeId, phase: Phase) -> str:
    """Where a VNode hears activations (fwd; those of a validation too) or gradients (bwd); its host subscribes for it."""
    return f"dcnr.net.{network}.{node}.{'bwd' if phase == 'bwd' else 'fwd'}"


def step(network: NetworkId) -> str:
    """The trainer's broadcast of decisions to every PNode of a network."""
    return f"dcnr.net.{network}.step"


def report(network: NetworkId) -> str:
    """PNodes to whichever orchestrator leads."""
    return f"dcnr.net.{network}.report"


def peer(pnode: PNodeId, what: Literal["chunk", "credit", "meet", "echo"]) -> str:
    """Tensor chunks to one peer, the credits that let its senders go on, the wish for a direct connection; an orchestrator's echo."""
    return f"dcnr.peer.{pnode}.{what}"


def heartbeat(pnode: PNodeId) -> str:
    """Liveness and status of one PNode."""
    return f"dcnr.pnode.{pnode}.heartbeat"


def command(pnode: PNodeId) -> str:
    """Orchestrator to one PNode: deploy, save, undeploy."""
    return f"dcnr.pnode.{pnode}.cmd"


def api(verb: str) -> str:
    """The orchestrator's API; `verb` is `noun.action`, as `session.create`."""
    return f"dcnr.api.{verb}"


def metrics(kind: MetricKind, id: SessionId | PNodeId) -> str:
    """Step rows, validations and state changes of a session, status of a PNode."""
    return f"dcnr.metrics.{kind}.{id}"
