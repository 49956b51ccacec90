"""Subjects are built of ids, and fall under the wildcards that are listened to."""

from __future__ import annotations

from dcnr.bus import subjects
from dcnr.bus.memory import matches
from dcnr.ids import NetworkId, NodeId, PNodeId, SessionId

NET, NODE, PNODE, SESSION = NetworkId("net"), NodeId("node"), PNodeId("p"), SessionId("s")


def test_subjects() -> None:
    """As in the protocol's table."""
    assert subjects.hop(NET, NODE, "fwd") == subjects.hop(NET, NODE, "eval") == "dcnr.net.net.node.fwd"
    assert subjects.step(NET) == "dcnr.net.net.step"
    assert subjects.peer(PNODE, "chunk") == "dcnr.peer.p.chunk"
    assert subjects.command(PNODE) == "dcnr.pnode.p.cmd"
    assert subjects.api("session.create") == "dcnr.api.session.create"


def test_wildcards_hear_what_they_are_for_and_nothing_else() -> None:
    """Of all subjects."""
    everything = [
        subjects.hop(NET, NODE, "bwd"),
        subjects.step(NET),
        subjects.report(NET),
        subjects.peer(PNODE, "credit"),
        subjects.heartbeat(PNODE),
        subjects.command(PNODE),
        subjects.metrics("step", SESSION),
        subjects.metrics("pnode", PNODE),
    ]
    heard = [[s for s in everything if matches(pattern, s)] for pattern in (subjects.HEARTBEATS, subjects.REPORTS, subjects.METRICS)]
    assert heard == [["dcnr.pnode.p.heartbeat"], ["dcnr.net.net.report"], ["dcnr.metrics.step.s", "dcnr.metrics.pnode.p"]]
