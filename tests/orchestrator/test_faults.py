"""A disturbed run ends with the numbers of an undisturbed one, whatever happens when."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from dcnr.bus.messages import Complete, Deploy, Refused, Report, SessionMetrics, Undeploy
from dcnr.ids import PNodeId
from dcnr.orchestrator.commands import Measured
from dcnr.orchestrator.events import DrainPNode, RebalanceSession, StartSession, SuspendSession
from tests.orchestrator.fakes import SESSION, Told, graph, record
from tests.orchestrator.stage import Stage
from tests.orchestrator.story import S

STEPS = 16


@cache
def quiet(steps: int) -> dict[int, tuple[float, bool]]:
    """The numbers of a run to which nothing happens."""
    stage = Stage(record(steps=steps, micro_batches=2))
    stage.until(lambda: stage.state is S.DONE)
    assert sorted(stage.numbers) == list(range(1, steps + 1))
    return stage.numbers


def reasons(stage: Stage) -> list[str]:
    """All that whoever watches was told."""
    return [c.metric.reason for c in stage.commands if isinstance(c, Measured) and isinstance(c.metric, SessionMetrics)]


def finished(stage: Stage) -> None:
    """It gets there, with the numbers of the quiet run and every step told."""
    stage.until(lambda: stage.state is S.DONE)
    assert stage.numbers == quiet(stage.session.record.steps)
    assert dict(sorted(stage.pnodes.decided.items())) == stage.numbers


def under_way(names: str = "ab", steps: int = STEPS, checkpoint_every: int = 0, pnodes: int = 0) -> Stage:
    """All of these PNodes take part and train, and three steps are done."""
    stage = Stage(record(steps, 2, pnodes, checkpoint_every=checkpoint_every), names)
    stage.until(lambda: stage.state is S.RUNNING and len(stage.session.hosts) == len(names) and stage.session.step >= 3)
    return stage


@pytest.mark.parametrize("pnodes", ["a", "ab"])
@pytest.mark.parametrize("ms", range(0, 400, 40))
def test_a_leader_that_dies_costs_no_step(pnodes: str, ms: int) -> None:
    """At whatever moment: the next one adopts what runs; no PNode does a step twice, no epoch is new, no row is missing."""
    stage = under_way(pnodes)
    epoch = stage.session.record.epoch
    stage.wait(ms / 1000)
    stage.lead()
    assert stage.state is S.ADOPTING
    finished(stage)
    assert {row.epoch for row in stage.rows.values() if row.step > 3} == {epoch}
    assert set(stage.pnodes.times.values()) == {1}


@pytest.mark.parametrize("pnodes", ["a", "ab"])
def test_leaders_that_die_one_after_the_other_adopt_what_the_first_one_left(pnodes: str) -> None:
    """One that dies while it adopts leaves everything as it found it."""
    stage = under_way(pnodes)
    epoch = stage.session.record.epoch
    for _ in range(5):
        stage.lead()
        stage.wait(0.1)
    finished(stage)
    assert stage.session.record.epoch == epoch


def test_a_leader_that_dies_while_pnodes_deploy_is_followed_by_one_that_goes_on_deploying() -> None:
    """In the same epoch."""
    stage = Stage(record(steps=STEPS, micro_batches=2), "ab")
    stage.until(lambda: stage.state is S.DEPLOYING and len(stage.session.hosts) == 2)
    epoch = stage.session.record.epoch
    stage.until(lambda: all(one.epoch == epoch for name in "ab" for one in stage.pnodes.hosted_by(PNodeId(name))))
    stage.lead()
    stage.until(lambda: stage.state is S.DEPLOYING)
    assert stage.session.reason == "is still on a, b"
    finished(stage)
    assert stage.session.record.epoch == epoch


@pytest.mark.parametrize("pnodes", ["a", "ab"])
@pytest.mark.parametrize("ms", range(0, 300, 60))
def test_a_leader_that_dies_while_a_session_is_suspended_is_followed_by_one_that_suspends_it(pnodes: str, ms: int) -> None:
    """Nothing that was trained is lost, and a resume goes on from there."""
    stage = under_way(pnodes)
    stage.put(SuspendSession(2, SESSION))
    stage.wait(ms / 1000)
    stage.lead()
    stage.until(lambda: stage.state is S.SUSPENDED)
    done = stage.session.record.step
    assert done == max(step for _, step in stage.pnodes.times)
    stage.put(StartSession(3, SESSION, graph(), stage.session.record.newest))
    finished(stage)


def test_a_request_to_suspend_during_an_adoption_outlives_the_leader_that_took_it() -> None:
    """It was answered, so it must happen."""
    stage = under_way()
    stage.lead()
    stage.put(SuspendSession(2, SESSION))
    stage.lead()
    stage.until(lambda: stage.state is S.SUSPENDED)
    assert stage.session.record.step >= 3


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_leader_and_a_pnode_that_die_together_cost_only_what_came_after_the_checkpoint(name: str) -> None:
    """The new leader does not find it, and goes back with those that are there."""
    stage = under_way(checkpoint_every=2)
    stage.kill(name)
    stage.lead()
    stage.until(lambda: stage.state is S.RUNNING)
    assert len(stage.session.hosts) == 1
    finished(stage)


def test_a_session_that_waits_outlives_its_leader() -> None:
    """With its graph, and with what it knows of where it was: the survivor keeps its nodes."""
    stage = under_way("ab", checkpoint_every=2)
    kept = {node for node, home in stage.session.homes.items() if home == "a"}
    stage.silent = {PNodeId("a"), PNodeId("b")}
    stage.until(lambda: stage.state is S.WAITING and "start one" in stage.session.reason)
    stage.lead()
    assert stage.state is S.WAITING
    stage.silent = {PNodeId("b")}
    stage.until(lambda: stage.state is S.RUNNING)
    assert kept <= {node for node, home in stage.session.homes.items() if home == "a"}
    stage.silent = set()
    finished(stage)


def test_a_pnode_that_hangs_is_done_without_until_it_gets_on() -> None:
    """It is alive, has work, and does none: after 45 s the others go on, and it is left alone; when it moves it takes part again."""
    stage = under_way("abc", steps=4000, checkpoint_every=50)
    stage.pnodes.stuck.add(PNodeId("b"))
    at = stage.now
    stage.until(lambda: PNodeId("b") not in stage.session.hosts)
    assert 40.0 < stage.now - at < 50.0
    assert stage.session.doubts.avoided.keys() == {"b"}
    stage.until(lambda: stage.state is S.RUNNING)
    assert sorted(stage.session.hosts) == ["a", "c"]
    assert not [c for c in stage.sent(Undeploy) if c.subject == "dcnr.pnode.b.cmd" and c.message.epoch == stage.session.record.epoch - 1]
    stage.pnodes.stuck.clear()
    stage.until(lambda: stage.state is S.RUNNING and len(stage.session.hosts) == 3)
    assert not stage.session.doubts.avoided


def test_a_pnode_that_forgets_the_session_is_found() -> None:
    """It beats, and hosts nothing: after ten seconds the session goes back, without it at first."""
    stage = under_way(checkpoint_every=2, steps=400)
    for hosting in stage.pnodes.hosted.values():
        hosting.parts.pop(PNodeId("b"), None)
    stage.until(lambda: stage.state is S.RUNNING and stage.session.hosts == {"a"})
    assert any("has not hosted the session for 10 s" in reason for reason in reasons(stage))


def test_more_pnodes_take_part_from_a_checkpoint_on() -> None:
    """Once one is complete, and only if that uses more of them than before."""
    stage = under_way("a", steps=60, checkpoint_every=4)
    stage.join("b")
    stage.until(lambda: stage.session.hosts == {"a", "b"})
    assert any(reason.startswith("spreads to PNode b; goes back to step") for reason in reasons(stage))
    finished(stage)


def test_a_session_that_has_as_many_pnodes_as_it_wants_stays_where_it_is() -> None:
    """A third that joins is not for it."""
    stage = under_way("ab", steps=60, checkpoint_every=4, pnodes=2)
    stage.join("c")
    finished(stage)
    assert PNodeId("c") in stage.cluster.fleet.members
    assert all(epoch == stage.session.record.epoch for epoch in {row.epoch for row in stage.rows.values() if row.step > 3})


def test_a_session_is_divided_anew_by_request_at_a_checkpoint_that_is_taken_for_it() -> None:
    """No step is repeated."""
    stage = under_way("a", steps=60)
    stage.join("b")
    stage.until(lambda: PNodeId("b") in stage.cluster.fleet.members)
    stage.put(RebalanceSession(9, SESSION))
    assert stage.session.reason == "is divided anew"
    finished(stage)
    assert any(reason.startswith("is divided anew; goes on from step") for reason in reasons(stage))
    assert all(times == 1 for (_, step), times in stage.pnodes.times.items() if step > 3)


def test_a_drain_that_a_leader_did_not_finish_is_finished_by_the_next() -> None:
    """The record says that the PNode is being drained."""
    stage = under_way("ab")
    stage.put(DrainPNode(9, PNodeId("b")))
    stage.lead()
    stage.until(lambda: stage.session.hosts == {"a"})
    finished(stage)


def test_a_damaged_checkpoint_is_forgotten_and_the_next_older_one_used() -> None:
    """At the end there is the seed."""
    stage = under_way("ab", checkpoint_every=3)
    stage.until(lambda: stage.session.record.step >= 6)
    stage.pnodes.damaged = {checkpoint.key for checkpoint in stage.storage.values()}
    stage.kill("b")
    finished(stage)
    assert sum("is damaged, says PNode a: its sha256 is another one" in reason for reason in reasons(stage)) >= 2
    assert "deploys to a" in reasons(stage)


def test_a_session_whose_last_checkpoint_is_damaged_fails_rather_than_starting_over() -> None:
    """With the reason, and at the step that it had reached."""
    stage = under_way("ab", checkpoint_every=1)
    stage.until(lambda: stage.session.record.checkpoints[0].step > 0)
    stage.pnodes.damaged = {checkpoint.key for checkpoint in stage.storage.values()}
    stage.kill("b")
    stage.until(lambda: stage.state is S.FAILED)
    assert "cannot be read, says PNode a: its sha256 is another one" in stage.session.record.reason


def test_a_pnode_that_refuses_does_not_stop_a_session_that_trains_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once, when it joins; not at every checkpoint."""
    stage = under_way("a", checkpoint_every=2)
    told, refused = stage.pnodes.told, list[int]()

    def tell(pnode: PNodeId, message: Told) -> list[Report]:
        if pnode != "b" or not isinstance(message, Deploy):
            return told(pnode, message)
        refused.append(message.epoch)
        return [Refused(pnode, message.session, message.epoch, "it sees another folder")]

    monkeypatch.setattr(stage.pnodes, "told", tell)
    stage.join("b")
    finished(stage)
    assert len(set(refused)) == 1
    assert stage.session.record.reason == ""


def test_only_the_checkpoints_that_are_to_be_kept_stay_in_storage() -> None:
    """The newest three, and those of round steps; PNodes hear of each that is complete."""
    stage = Stage(record(steps=STEPS, micro_batches=2, checkpoint_every=1, keep_every=5), "ab")
    finished(stage)
    stage.wait(0.1)
    assert sorted(stage.storage) == [c.step for c in stage.session.record.checkpoints] == [0, 5, 10, 14, 15, 16]
    complete = {c.message.step for c in stage.sent(Complete) if isinstance(c.message, Complete)}
    assert complete == set(range(STEPS + 1))


def test_a_step_that_lost_a_message_is_fed_again_within_seconds_and_nothing_else_happens() -> None:
    """The second attempt; no epoch, no checkpoint, no PNode changes."""
    stage = under_way("ab")
    epoch, at = stage.session.record.epoch, stage.now
    stage.loss = 1.0 / 3
    stage.wait(0.3)
    stage.loss = 0.0
    stage.until(lambda: any(hop.attempt == 1 for hop in stage.pnodes.hops))
    assert stage.now - at < 3.0
    finished(stage)
    assert stage.session.record.epoch == epoch


@pytest.mark.parametrize("pnodes", ["a", "ab", "abc"])
@pytest.mark.parametrize("seed", range(8))
def test_lost_repeated_and_reordered_messages_change_no_number(pnodes: str, seed: int) -> None:
    """Three of a hundred messages are lost, as many come twice, all of them in another order."""
    finished(Stage(record(steps=STEPS, micro_batches=2, checkpoint_every=3), pnodes, seed, loss=0.03))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("pnodes", ["a", "abc"])
def test_leaders_that_die_at_any_moment_change_no_number(pnodes: str, seed: int) -> None:
    """The next one goes on from the records and from what PNodes say; while no message is lost, no step is done twice."""
    stage = Stage(record(steps=STEPS, micro_batches=2, checkpoint_every=3), pnodes, seed)
    rng = np.random.default_rng(seed)
    for _ in range(4):
        stage.wait(float(rng.uniform(0.0, 0.8)))
        stage.lead()
    finished(stage)
    assert set(stage.pnodes.times.values()) == {1}


@pytest.mark.parametrize("seed", range(30))
def test_anything_that_dies_at_any_moment_changes_no_number(seed: int) -> None:
    """PNodes are killed, cut off, hang and come back, leaders change, messages are lost, all at once."""
    stage = Stage(record(steps=STEPS, micro_batches=2, checkpoint_every=3), "abc", seed, loss=float(seed % 3) * 0.01)
    rng = np.random.default_rng(seed)
    for _ in range(8):
        stage.wait(float(rng.uniform(0.0, 0.5)) if rng.random() < 0.6 else float(rng.uniform(0.0, 5.0)))
        name = str(rng.choice(list("abc")))
        match int(rng.integers(5)):
            case 0 if name in stage.there:
                stage.kill(name)
            case 1 if name not in stage.there:
                stage.join(name)
            case 2:
                stage.lead()
            case 3:
                stage.silent ^= {PNodeId(name)}
            case _:
                stage.deaf = not stage.deaf
    stage.deaf = False
    stage.silent.clear()
    for name in "abc":
        if name not in stage.there:
            stage.join(name)
    finished(stage)
