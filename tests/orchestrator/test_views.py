"""What the API shows."""

from __future__ import annotations

from dataclasses import replace

from dcnr.bus import codec
from dcnr.bus.messages import Heartbeat, Hosted, PeerLink
from dcnr.ids import Epoch, NetworkId, PNodeId
from dcnr.orchestrator import views
from dcnr.orchestrator.cluster import Cluster
from dcnr.orchestrator.events import CreateSession, DrainPNode, Heard
from dcnr.orchestrator.state import NetworkRecord, Records
from tests.orchestrator.fakes import SESSION, graph, info, record
from tests.orchestrator.story import SETTINGS


def cluster() -> Cluster:
    """One session deploying to PNode a, which says that it hosts three VNodes of it."""
    one = Cluster(Records(), {}, SETTINGS, 0.0)
    one.handle(Heard(Heartbeat(replace(info("a"), memory_used=5), ())), 0.0)
    one.handle(CreateSession(1, record(), graph()), 0.1)
    links = (PeerLink(PNodeId("b"), "tcp", 1234.5),)
    one.handle(Heard(Heartbeat(replace(info("a"), memory_used=7), (Hosted(SESSION, Epoch(1), 0, 3, 7),), links=links)), 0.2)
    return one


def test_everything_shown_can_be_packed() -> None:
    """Enums and ids become plain values on the way."""
    one = cluster()
    session, member = one.sessions[SESSION], one.fleet.members[PNodeId("a")]
    rows = [
        views.cluster_info(one, "file:///data", "1"),
        views.network_row(NetworkRecord(NetworkId("small"), "", "", 5, 300)),
        views.session_details(session),
        views.session_state(session),
        views.pnode_row(member),
        views.pnode_details(one, PNodeId("a")),
    ]
    assert [codec.unpack(codec.pack(row)) for row in rows] == rows


def test_a_session_shows_its_assignment_while_it_has_one() -> None:
    """By the ids of the prepared graph."""
    shown = views.session_details(cluster().sessions[SESSION])
    assert shown["assignment"] == {"embed": "a", "act": "a", "loss": "a"}
    assert (shown["state"], shown["epoch"], shown["steps"]) == ("deploying", 1, 4)


def test_a_pnode_shows_what_it_last_said_and_what_it_is_to_hold() -> None:
    """Memory and counts by its heartbeat, names by the assignment; draining is a reason."""
    one = cluster()
    shown = views.pnode_details(one, PNodeId("a"))
    assert (shown["memory_used"], shown["vnodes"], shown["sessions"], shown["reason"]) == (7, 3, ["s"], "")
    assert shown["links"] == [{"peer": "b", "lane": "tcp", "mb_per_s": 1234.5}]
    assert shown["nodes"] == {"s": ["embed", "act", "loss"]}
    assert [(row["session"], row["vnode"]) for row in shown["memory"]] == [("s", "embed"), ("s", "act"), ("s", "loss")]
    embed = shown["memory"][0]
    assert embed["optimizer_bytes"] > embed["parameter_bytes"] > embed["activation_bytes"] > embed["recompute_bytes"] == 0
    one.handle(DrainPNode(1, PNodeId("a")), 0.3)
    assert views.pnode_row(one.fleet.members[PNodeId("a")])["reason"] == "draining"
