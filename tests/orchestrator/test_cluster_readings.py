"""Checkpoints that are read, beside sessions: what is kept for them, what they are offered, and who is told to let go."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcnr.bus.messages import Deploy, Deployed, Failed, Heartbeat, Hosted, Refused, Undeploy
from dcnr.ids import Epoch, PNodeId
from dcnr.orchestrator.cluster import Cluster
from dcnr.orchestrator.commands import Command, Prune, Publish
from dcnr.orchestrator.events import CreateSession, DrainPNode, Echoed, Heard, ManifestWritten, Reported, StopGenerating, Tick
from dcnr.orchestrator.reading import IDLE
from dcnr.orchestrator.state import CheckpointRecord, PNodeRecord, PNodeState, Records
from tests.orchestrator.fakes import SESSION, graph, info, record
from tests.orchestrator.reader import ask, source
from tests.orchestrator.story import SETTINGS

READING = source().name


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """With one PNode."""
    cluster = Cluster(Records(), {}, SETTINGS, 0.0)
    cluster.handle(Heard(Heartbeat(info("a"), ())), 0.0)
    yield cluster
    cluster.validate()


def told(commands: list[Command], kind: type[Deploy | Undeploy]) -> list[Epoch]:
    """The epochs of all that PNodes are told of a reading."""
    messages = [command.message for command in commands if isinstance(command, Publish)]
    return [message.epoch for message in messages if isinstance(message, kind) and message.session == READING]


def pass_time(cluster: Cluster, now: float, until: float, *hosted: Hosted) -> list[Command]:
    """With heartbeats."""
    commands: list[Command] = []
    while now < until:
        now += 0.5
        commands += [
            *cluster.handle(Echoed(), now),
            *cluster.handle(Heard(Heartbeat(info("a"), hosted)), now),
            *cluster.handle(Tick(), now),
        ]
    return commands


def written(cluster: Cluster, step: int, now: float) -> list[int]:
    """A checkpoint of session `s` is complete: the steps that are removed for it."""
    scaler = {"updates": step, "loss_scale": 1.0, "good_steps": step, "dynamic": False}
    commands = cluster.handle(ManifestWritten(SESSION, Epoch(1), CheckpointRecord(step, f"key{step}", scaler)), now)
    return [step for command in commands if isinstance(command, Prune) for step in command.steps]


def test_what_is_read_stays_in_storage_until_it_is_read_no_more(cluster: Cluster) -> None:
    """Or else a reading that is deployed again would find it damaged. It goes with the next checkpoint after."""
    cluster.handle(CreateSession(1, record(steps=50, keep_last=1), graph()), 0.0)
    assert written(cluster, 3, 0.0) == []
    cluster.handle(ask(), 0.0)
    assert written(cluster, 6, 0.0) == []
    assert [known.step for known in cluster.sessions[SESSION].record.checkpoints] == [3, 6]
    cluster.handle(StopGenerating(2, "r"), 0.0)
    pass_time(cluster, 0.0, IDLE + 1)
    assert READING not in cluster.readings.all
    assert 3 in written(cluster, 9, IDLE + 1)


def serve(cluster: Cluster, epoch: int, now: float) -> None:
    """It has answered its deploy."""
    cluster.handle(Reported(Deployed(PNodeId("a"), READING, Epoch(epoch), 3, 100)), now)


def test_who_has_nothing_to_do_makes_room_for_who_waits(cluster: Cluster) -> None:
    """At once, and not before: the next request may come. Who has requests keeps its room."""
    assert told(cluster.handle(ask(), 0.0), Deploy) == [1]
    serve(cluster, 1, 0.0)
    more = cluster.handle(CreateSession(2, record(pnodes=9), graph()), 0.0)
    assert told(more, Undeploy) == []
    cluster.handle(StopGenerating(3, "r"), 0.0)
    assert told(pass_time(cluster, 0.0, 5.0), Undeploy) == [1]
    assert told(cluster.handle(ask("again"), 5.5), Deploy) == [2]


def test_what_goes_back_is_offered_the_fleet_at_once_unless_it_was_refused(cluster: Cluster) -> None:
    """A refusal would only come again."""
    cluster.handle(ask(), 0.0)
    failed = Failed(PNodeId("a"), READING, Epoch(1), "the device is gone", "", world=True)
    assert told(cluster.handle(Reported(failed), 0.0), Deploy) == [2]
    assert told(cluster.handle(Reported(Refused(PNodeId("a"), READING, Epoch(2), "no", False)), 0.0), Deploy) == []
    assert told(pass_time(cluster, 0.0, 5.5), Deploy) == [3]


def test_what_moves_away_from_a_pnode_that_is_drained_goes_elsewhere_at_once(cluster: Cluster) -> None:
    """Text does not stop until the next offer."""
    cluster.handle(Heard(Heartbeat(info("b", memory=1 << 20), ())), 0.0)
    assert told(cluster.handle(ask(), 0.0), Deploy) == [1]
    commands = cluster.handle(DrainPNode(2, PNodeId("a")), 0.1)
    assert [c.subject for c in commands if isinstance(c, Publish) and isinstance(c.message, Deploy)] == ["dcnr.pnode.b.cmd"]


def test_a_new_leader_reads_nothing_before_it_knows_who_is_there() -> None:
    """Or it would crowd onto the first PNode that says something."""
    known = tuple(PNodeRecord(info(name), PNodeState.ALIVE) for name in ("a", "b"))
    cluster = Cluster(Records(pnodes=known), {}, SETTINGS, 0.0)
    cluster.handle(Heard(Heartbeat(info("a"), ())), 0.0)
    assert told(cluster.handle(ask(), 0.0), Deploy) == []
    assert told(cluster.handle(Heard(Heartbeat(info("b"), ())), 0.1), Deploy) == [1]


def test_what_an_older_leader_read_is_let_go_of_and_read_in_a_newer_epoch(cluster: Cluster) -> None:
    """Whoever asked it asks this one again, and PNodes take no older epoch."""
    left = Hosted(READING, Epoch(7), 3, 3, 100)
    assert told(cluster.handle(Heard(Heartbeat(info("a"), (left,))), 0.1), Undeploy) == [7]
    assert told(cluster.handle(ask(), 0.2), Deploy) == [8]
    later = cluster.handle(Heard(Heartbeat(info("a"), (left, Hosted(READING, Epoch(8), 3, 3, 100)))), 0.3)
    assert told(later, Undeploy) == [7]
