"""The whole orchestrator as a machine: requests, the fleet and sessions together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from dcnr.bus.messages import Decision, Deploy, Deployed, Heartbeat, Hosted, Refused, SessionMetrics, Undeploy
from dcnr.errors import AlreadyExists, NotFound, UserError
from dcnr.ids import Epoch, NetworkId, PNodeId, SessionId
from dcnr.orchestrator.cluster import OFFER_EVERY, Cluster
from dcnr.orchestrator.commands import Answer, Command, Drop, Erase, Measured, Publish, SetPeers, Store
from dcnr.orchestrator.events import (
    CreateSession,
    DeleteSession,
    DrainPNode,
    DropNetwork,
    Echoed,
    Erased,
    Heard,
    ManifestWritten,
    PutNetwork,
    RebalanceSession,
    Reported,
    StartSession,
    SuspendSession,
    Tick,
)
from dcnr.orchestrator.state import AssignmentRecord, CheckpointRecord, NetworkRecord, PNodeRecord, PNodeState, Records, SessionState
from tests.orchestrator.fakes import NETWORK, SESSION, graph, info, record
from tests.orchestrator.story import SETTINGS, S

SMALL = NetworkRecord(NetworkId("small"), NETWORK, "small.yml", 5, 300)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A new cluster that knows the small network."""
    cluster = Cluster(Records(networks=(SMALL,)), {}, SETTINGS, 0.0)
    yield cluster
    cluster.validate()


def beat(name: str, *hosted: Hosted, stopping: bool = False) -> Heard:
    """A heartbeat."""
    return Heard(Heartbeat(info(name), hosted, stopping))


def error_of(commands: list[Command]) -> UserError | None:
    """The answer's error; there must be exactly one answer."""
    (answer,) = [command for command in commands if isinstance(command, Answer)]
    return answer.error


def deploys(commands: list[Command]) -> list[str]:
    """Who is told to deploy."""
    return [command.subject for command in commands if isinstance(command, Publish) and isinstance(command.message, Deploy)]


def state(cluster: Cluster, name: str = "s") -> SessionState:
    """Of a session."""
    return cluster.sessions[SessionId(name)].record.state


def test_a_network_is_registered_once_unless_it_is_to_be_replaced(cluster: Cluster) -> None:
    """A taken name is refused and changes nothing; a replacement is a new revision."""
    other = replace(SMALL, parameters=1)
    assert isinstance(error_of(cluster.handle(PutNetwork(1, other, replace=False), 0.0)), AlreadyExists)
    assert cluster.networks[SMALL.name] == SMALL
    commands = cluster.handle(PutNetwork(2, other, replace=True), 0.0)
    assert commands == [Store(replace(other, revision=2)), Answer(2)]


def test_a_network_that_a_session_uses_is_not_dropped(cluster: Cluster) -> None:
    """First the session, then the network."""
    cluster.handle(CreateSession(1, record(), None), 0.0)
    assert "used by session s" in str(error_of(cluster.handle(DropNetwork(2, SMALL.name), 0.0)))
    cluster.handle(DeleteSession(3, SESSION), 0.0)
    assert cluster.handle(DropNetwork(4, SMALL.name), 0.0) == [Drop("dcnr_networks", "small"), Answer(4)]
    assert isinstance(error_of(cluster.handle(DropNetwork(5, SMALL.name), 0.0)), NotFound)


def test_a_session_is_created_at_rest_or_started_at_once(cluster: Cluster) -> None:
    """Without a graph nothing is deployed."""
    cluster.handle(beat("a"), 0.0)
    assert deploys(cluster.handle(CreateSession(1, record(), None), 0.1)) == []
    assert state(cluster) is S.CREATED
    other = replace(record(), session=SessionId("t"))
    assert deploys(cluster.handle(CreateSession(2, other, graph()), 0.2)) == ["dcnr.pnode.a.cmd"]
    assert isinstance(error_of(cluster.handle(CreateSession(3, other, graph()), 0.3)), AlreadyExists)


def test_a_network_that_comes_with_a_session_is_registered_with_it_or_not_at_all(cluster: Cluster) -> None:
    """As the next revision of its name; a refused session changes no network."""
    other = replace(SMALL, parameters=1)
    first, *_ = cluster.handle(CreateSession(1, record(), None, other), 0.0)
    assert first == Store(replace(other, revision=2))
    assert isinstance(error_of(cluster.handle(CreateSession(2, record(), None, SMALL), 0.1)), AlreadyExists)
    assert cluster.networks[SMALL.name] == replace(other, revision=2)


def test_a_session_without_pnodes_goes_on_when_one_joins(cluster: Cluster) -> None:
    """It waits and says for what; the join is the trigger."""
    cluster.handle(CreateSession(1, record(), graph()), 0.0)
    assert "start one with `dcnr-agent`" in cluster.sessions[SESSION].record.reason
    commands = cluster.handle(beat("a"), 1.0)
    assert deploys(commands) == ["dcnr.pnode.a.cmd"]
    assert SetPeers((info("a"),)) in commands


def test_a_waiting_session_is_offered_the_fleet_every_five_seconds(cluster: Cluster) -> None:
    """Memory that became free is found without an event that says so."""
    full = Heard(Heartbeat(info("a"), (Hosted(SessionId("other"), Epoch(1), 0, 1, info("a").memory_total),)))
    cluster.handle(full, 0.0)
    cluster.handle(CreateSession(1, record(), graph()), 0.0)
    assert state(cluster) is S.WAITING
    for half in range(1, 10):
        cluster.handle(Echoed(), half / 2)
        cluster.handle(beat("a"), half / 2)
    assert cluster.deadline() == OFFER_EVERY
    assert deploys(cluster.handle(Tick(), OFFER_EVERY)) == ["dcnr.pnode.a.cmd"]


def test_a_session_that_ends_makes_room_for_one_that_waits(cluster: Cluster) -> None:
    """The other is offered the fleet at once."""
    cluster.handle(CreateSession(1, record(), graph()), 0.0)
    cluster.handle(CreateSession(2, replace(record(pnodes=1), session=SessionId("t")), None), 0.0)
    cluster.handle(beat("a"), 0.0)
    cluster.sessions[SessionId("t")].handle(StartSession(3, SessionId("t"), graph()), 0.1)
    commands = cluster.handle(SuspendSession(4, SESSION), 0.2)
    assert deploys(commands) == ["dcnr.pnode.a.cmd"]
    assert (state(cluster), state(cluster, "t")) == (S.SUSPENDED, S.DEPLOYING)


def run(cluster: Cluster, now: float) -> None:
    """Bring session s from deploying to running."""
    session = cluster.sessions[SESSION]
    assert session.run is not None
    for pnode in session.run.hosts:
        cluster.handle(Reported(Deployed(pnode, SESSION, Epoch(1), 0, 1)), now)
    checkpoint = CheckpointRecord(0, "k", {"updates": 0, "loss_scale": 1.0, "good_steps": 0, "dynamic": False})
    cluster.handle(ManifestWritten(SESSION, Epoch(1), checkpoint), now)
    assert state(cluster) is S.RUNNING


def test_a_pnode_that_dies_during_a_deploy_makes_the_session_be_placed_anew(cluster: Cluster) -> None:
    """Nothing was trained yet, so nobody has to be asked."""
    cluster.handle(beat("a"), 0.0)
    cluster.handle(beat("b"), 0.0)
    cluster.handle(CreateSession(1, record(), graph()), 0.1)
    assert deploys(cluster.handle(beat("b", stopping=True), 0.2)) == ["dcnr.pnode.a.cmd"]


def test_a_session_that_loses_a_pnode_is_placed_again_in_the_same_moment(cluster: Cluster) -> None:
    """No heartbeat comes between: nobody is told to let go who takes part again; the reason reaches whoever watches."""
    cluster.handle(beat("a"), 0.0)
    cluster.handle(beat("b"), 0.0)
    cluster.handle(CreateSession(1, record(), graph()), 0.1)
    run(cluster, 0.1)
    commands = cluster.handle(beat("b", stopping=True), 0.2)
    told = [c.metric.reason for c in commands if isinstance(c, Measured) and isinstance(c.metric, SessionMetrics)]
    assert told == ["PNode b was stopped; goes back to step 0", "deploys to a"]
    published = [(c.subject, type(c.message), c.message.epoch) for c in commands if isinstance(c, Publish)]
    assert published == [("dcnr.pnode.b.cmd", Undeploy, 1), ("dcnr.pnode.a.cmd", Deploy, 2)]
    assert SetPeers((info("a"),)) in commands


def test_a_process_that_starts_anew_under_the_same_name_takes_part_again_at_once(cluster: Cluster) -> None:
    """Its old life is lost, and it is there already."""
    cluster.handle(beat("a"), 0.0)
    cluster.handle(beat("b"), 0.0)
    cluster.handle(CreateSession(1, record(), graph()), 0.1)
    run(cluster, 0.1)
    cluster.handle(Echoed(), 1.0)
    cluster.handle(beat("a"), 1.1)
    cluster.handle(Echoed(), 1.9)
    assert deploys(cluster.handle(Heard(Heartbeat(info("b", incarnation="2"), ())), 2.0)) == ["dcnr.pnode.a.cmd", "dcnr.pnode.b.cmd"]


def test_what_a_session_holds_itself_counts_as_free_for_it(cluster: Cluster) -> None:
    """Otherwise no survivor would have room for what it holds already."""
    room = 40_000
    small = replace(info("a"), memory_total=room)
    cluster.handle(Heard(Heartbeat(small, ())), 0.0)
    cluster.handle(beat("b"), 0.0)
    cluster.handle(CreateSession(1, record(), graph()), 0.1)
    run(cluster, 0.1)
    cluster.handle(Heard(Heartbeat(small, (Hosted(SESSION, Epoch(1), 0, 1, room - 1),))), 0.2)
    assert deploys(cluster.handle(beat("b", stopping=True), 0.3)) == ["dcnr.pnode.a.cmd"]


def test_silence_is_found_by_the_deadline(cluster: Cluster) -> None:
    """The machine asks to be woken exactly when a PNode becomes dead; nobody is there, so the session waits and says for what."""
    cluster.handle(beat("a"), 0.0)
    cluster.handle(CreateSession(1, record(), graph()), 0.1)
    run(cluster, 0.1)
    for tenth in range(1, 30):
        cluster.handle(Echoed(), tenth / 10)
    while (due := cluster.deadline()) is not None and due < 3.0:
        cluster.handle(Tick(), due)
    commands = cluster.handle(Tick(), 3.0)
    told = [c.metric.reason for c in commands if isinstance(c, Measured) and isinstance(c.metric, SessionMetrics)]
    assert told[0] == "PNode a has been silent for 3.0 s; goes back to step 0"
    assert state(cluster) is S.WAITING
    assert "start one with `dcnr-agent`" in told[1]
    assert deploys(cluster.handle(beat("c"), 3.1)) == ["dcnr.pnode.c.cmd"]


def test_whoever_hosts_what_it_should_not_is_told_to_let_go(cluster: Cluster) -> None:
    """An unknown session and an old epoch; not the present one."""
    cluster.handle(beat("a"), 0.0)
    cluster.handle(CreateSession(1, record(), graph()), 0.1)
    hosted = [Hosted(SESSION, Epoch(1), 0, 3, 1), Hosted(SESSION, Epoch(0), 0, 3, 1), Hosted(SessionId("gone"), Epoch(4), 0, 3, 1)]
    commands = cluster.handle(beat("a", *hosted), 0.2)
    assert commands == [
        Publish("dcnr.pnode.a.cmd", Undeploy(SESSION, Epoch(0))),
        Publish("dcnr.pnode.a.cmd", Undeploy(SessionId("gone"), Epoch(4))),
    ]


def test_a_session_under_way_is_not_deleted(cluster: Cluster) -> None:
    """Suspend first; then everything of it goes, whoever watches is told, and the answer comes when its files are gone."""
    cluster.handle(beat("a"), 0.0)
    cluster.handle(CreateSession(1, record(), graph()), 0.1)
    assert "dcnr session suspend s" in str(error_of(cluster.handle(DeleteSession(2, SESSION), 0.2)))
    cluster.handle(SuspendSession(3, SESSION), 0.3)
    gone = Measured(SessionMetrics(SESSION, "deleted", 0, "deleted by request"))
    assert cluster.handle(DeleteSession(4, SESSION), 0.4) == [
        Drop("dcnr_sessions", "s"), Drop("dcnr_assignments", "s"), Erase(4, SESSION), gone,
    ]  # fmt: skip
    assert cluster.handle(Erased(4, SESSION), 0.5) == [Answer(4)]
    assert isinstance(error_of(cluster.handle(DeleteSession(5, SESSION), 0.5)), NotFound)


def test_files_that_stay_behind_are_an_answer(cluster: Cluster) -> None:
    """The session is gone all the same."""
    cluster.handle(CreateSession(1, record(), None), 0.1)
    cluster.handle(DeleteSession(2, SESSION), 0.2)
    assert "files are not: read-only" in str(error_of(cluster.handle(Erased(2, SESSION, "read-only"), 0.3)))
    assert cluster.sessions == {}


def test_requests_about_what_is_not_there_are_refused(cluster: Cluster) -> None:
    """Each with the name and where to look."""
    asks = (StartSession(1, SESSION, graph()), SuspendSession(1, SESSION), DrainPNode(1, PNodeId("a")))
    assert all(isinstance(error_of(cluster.handle(ask, 0.0)), NotFound) for ask in asks)


def test_a_request_that_does_not_suit_the_state_is_refused_in_words(cluster: Cluster) -> None:
    """Nothing changes."""
    cluster.handle(CreateSession(1, record(), None), 0.0)
    assert str(error_of(cluster.handle(SuspendSession(2, SESSION), 0.0))) == "session 's' is created, so there is nothing to suspend"
    cluster.handle(StartSession(3, SESSION, graph()), 0.0)
    assert str(error_of(cluster.handle(StartSession(4, SESSION, graph()), 0.0))) == "session 's' is waiting already"


def test_a_drained_pnode_is_left_alone_and_its_sessions_move(cluster: Cluster) -> None:
    """Deploying sessions are placed anew at once, without it."""
    cluster.handle(beat("a"), 0.0)
    cluster.handle(beat("b"), 0.0)
    cluster.handle(CreateSession(1, record(), graph()), 0.1)
    commands = cluster.handle(DrainPNode(2, PNodeId("a")), 0.2)
    assert error_of(commands) is None
    assert deploys(commands) == ["dcnr.pnode.b.cmd"]
    assert set(cluster.sessions[SESSION].homes.values()) == {"b"}


def test_a_refused_session_is_not_offered_the_same_fleet_at_once(cluster: Cluster) -> None:
    """Five seconds later, or when the fleet grows; otherwise it would be refused in a circle."""
    cluster.handle(beat("a"), 0.0)
    cluster.handle(CreateSession(1, record(), graph()), 0.1)
    assert deploys(cluster.handle(Reported(Refused(PNodeId("a"), SESSION, Epoch(1), "full")), 0.2)) == []
    assert cluster.sessions[SESSION].record.reason == "PNode a refused: full"
    assert deploys(cluster.handle(beat("b"), 0.3)) == ["dcnr.pnode.b.cmd"], "it fits without the one that refused"


def test_a_report_about_an_unknown_session_is_counted(cluster: Cluster) -> None:
    """It changes nothing."""
    assert cluster.handle(Reported(Deployed(PNodeId("a"), SESSION, Epoch(1), 0, 1)), 0.0) == []
    assert cluster.stray == 1


SCALER: dict[str, int | float] = {"updates": 2, "loss_scale": 1.0, "good_steps": 2, "dynamic": False}
NODES = {str(node.id): PNodeId("a") for node in graph().nodes}


def taken_over(now: float = 100.0, **fields: object) -> Cluster:
    """A new leader that finds session s running on PNode a, deployed in epoch 1 at step 2."""
    checkpoint = CheckpointRecord(2, "k", SCALER)
    running = replace(record(), state=S.RUNNING, epoch=Epoch(1), checkpoints=(checkpoint,), **fields)  # type: ignore[arg-type]
    rest = replace(record(), session=SessionId("t"), state=S.DONE)
    assignment = AssignmentRecord(SESSION, Epoch(1), NODES, 2)
    records = Records((SMALL,), (running, rest), (assignment,), (PNodeRecord(info("a"), PNodeState.ALIVE),))
    return Cluster(records, {SESSION: graph()}, replace(SETTINGS, first_epoch=Epoch(5_000_000)), now)


def test_a_new_leader_looks_for_what_was_under_way_and_says_so() -> None:
    """Nothing is written meanwhile, so that the next one would look for the same; sessions at rest are not told of again."""
    cluster = taken_over()
    (told,) = cluster.opening()
    assert told == Measured(SessionMetrics(SESSION, "adopting", 2, "the orchestrator changed; looks for its PNodes"))
    assert state(cluster, "t") is S.DONE
    last = Decision(SESSION, Epoch(1), 3, False, 0.1, 1.0, 1.0, 2.5, 1.0, 1.0, SCALER)
    hosted = Hosted(SESSION, Epoch(1), 3, 3, 1, last=last)
    commands = cluster.handle(beat("a", hosted), 100.1)
    assert [c for c in commands if isinstance(c, Publish)] == []
    assert (state(cluster), cluster.sessions[SESSION].record.epoch) == (S.RUNNING, 1)


def test_what_a_new_leader_does_not_find_goes_back_in_an_epoch_of_its_own() -> None:
    """After three seconds; epochs are larger than any of an earlier leader's, and than any that was heard of."""
    cluster = taken_over()
    for tenth in range(1, 32):
        cluster.handle(Echoed(), 100.0 + tenth / 10)
        cluster.handle(beat("a"), 100.0 + tenth / 10)
        if (due := cluster.deadline()) is not None and due <= 100.0 + tenth / 10:
            cluster.handle(Tick(), 100.0 + tenth / 10)
    session = cluster.sessions[SESSION]
    assert (session.record.state, session.record.epoch, session.record.recovers) == (S.DEPLOYING, 5_000_000, True)
    cluster.handle(beat("a", Hosted(SESSION, Epoch(7_000_000), 0, 1, 1)), 103.3)
    cluster.handle(beat("b"), 103.3)
    cluster.handle(beat("a", stopping=True), 103.4)
    assert session.record.epoch == 7_000_001


def test_a_session_whose_network_this_version_cannot_read_fails() -> None:
    """In words; and whoever holds it is told to let go."""
    running = replace(record(), state=S.RUNNING, epoch=Epoch(1))
    cluster = Cluster(Records((SMALL,), (running,)), {SESSION: "small.yml:3: no such type"}, SETTINGS, 0.0)
    stored, _ = cluster.opening()
    assert isinstance(stored, Store)
    assert (state(cluster), cluster.sessions[SESSION].record.reason) == (S.FAILED, "small.yml:3: no such type")
    assert Publish("dcnr.pnode.a.cmd", Undeploy(SESSION, Epoch(1))) in cluster.handle(beat("a", Hosted(SESSION, Epoch(1), 0, 1, 1)), 0.1)


def test_a_new_leader_places_nothing_before_it_knows_who_is_there() -> None:
    """A session would end up on the first that is heard; whoever stays silent is dead after three seconds."""
    waits = replace(record(), state=S.WAITING)
    members = tuple(PNodeRecord(info(name), PNodeState.ALIVE) for name in "abc")
    cluster = Cluster(Records((SMALL,), (waits,), (), members), {SESSION: graph()}, SETTINGS, 0.0)
    assert [type(command) for command in cluster.opening()] == [Store, Measured]
    assert deploys(cluster.handle(beat("a"), 0.1)) == deploys(cluster.handle(beat("b"), 0.2)) == []
    placed: list[str] = []
    for half in range(1, 9):
        for event in (Echoed(), beat("a"), beat("b")):
            placed += deploys(cluster.handle(event, half / 2))
        while (due := cluster.deadline()) is not None and due <= half / 2:
            placed += deploys(cluster.handle(Tick(), half / 2))
    assert placed == ["dcnr.pnode.a.cmd", "dcnr.pnode.b.cmd"]
    assert state(cluster) is S.DEPLOYING


def test_a_name_that_is_used_again_gets_newer_epochs(cluster: Cluster) -> None:
    """PNodes take no epoch that they have let go of."""
    cluster.handle(beat("a"), 0.0)
    for request in (1, 4):
        cluster.handle(CreateSession(request, record(), graph()), 0.1)
        cluster.handle(SuspendSession(request + 1, SESSION), 0.2)
        epoch = cluster.sessions[SESSION].record.epoch
        cluster.handle(DeleteSession(request + 2, SESSION), 0.3)
    assert epoch == 2


def test_nobody_is_judged_while_the_orchestrator_is_deaf(cluster: Cluster) -> None:
    """Not even long after; when the echo is back, all clocks start anew."""
    cluster.handle(beat("a"), 0.0)
    cluster.handle(CreateSession(1, record(), graph()), 0.1)
    run(cluster, 0.1)
    assert cluster.handle(Tick(), 500.0) == []
    assert cluster.deadline() is None
    cluster.handle(Echoed(), 600.0)
    assert cluster.handle(Tick(), 600.9) == []
    assert state(cluster) is S.RUNNING
    due = cluster.deadline()
    assert due is not None
    assert due > 600.9


def test_an_echo_after_a_gap_that_nothing_noticed_forgives_too(cluster: Cluster) -> None:
    """The process was stopped: its first event is the echo that had been on its way."""
    cluster.handle(beat("a"), 0.0)
    cluster.handle(CreateSession(1, record(), graph()), 0.1)
    run(cluster, 0.1)
    cluster.handle(Echoed(), 600.0)
    cluster.handle(beat("a", Hosted(SESSION, Epoch(1), 0, 1, 1)), 600.1)
    assert cluster.handle(Tick(), 600.2) == []
    assert state(cluster) is S.RUNNING


def test_a_session_is_divided_anew_only_if_that_changes_something(cluster: Cluster) -> None:
    """Refused in words otherwise, and if it does not run."""
    cluster.handle(beat("a"), 0.0)
    assert isinstance(error_of(cluster.handle(RebalanceSession(1, SESSION), 0.0)), NotFound)
    cluster.handle(CreateSession(2, record(), graph()), 0.1)
    assert "only a running one can be divided anew" in str(error_of(cluster.handle(RebalanceSession(3, SESSION), 0.1)))
    run(cluster, 0.2)
    assert str(error_of(cluster.handle(RebalanceSession(4, SESSION), 0.3))) == "session 's' would stay as it is, on a"
    cluster.handle(beat("b"), 0.3)
    assert error_of(cluster.handle(RebalanceSession(5, SESSION), 0.4)) is None
