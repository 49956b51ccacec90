"""One session that loses PNodes, its leader, its data or its numbers: where it goes back to, and what ends it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dcnr.bus.messages import Deploy, Deployed, Failed, SessionMetrics, StepMetrics, Undeploy
from dcnr.ids import Epoch, PNodeId
from dcnr.orchestrator.commands import Measured, Publish, Store
from dcnr.orchestrator.events import BatchFailed, BatchRead, Lost, Offered, Tick
from dcnr.orchestrator.session import Session
from dcnr.orchestrator.state import AssignmentRecord, CheckpointRecord, SessionRecord
from tests.orchestrator.fakes import SESSION, graph, info, record
from tests.orchestrator.story import FIRST, ONE, SETTINGS, START, TWO, A, B, C, PNodes, S, Story, nothing, running, tokens, trained


def test_a_lost_pnode_makes_the_session_go_back_and_on() -> None:
    """It waits, says why and where it goes back to, and is placed again with what is left: the losses are those of the quiet run."""
    story = running(until=5, checkpoint_every=2, steps=8)
    story.tell(Lost(C, "never used"))
    assert story.state is S.RUNNING
    story.tell(Lost(B, "PNode b has been silent for 3.0 s"))
    assert (story.state, story.session.record.step, story.session.record.recovers) == (S.WAITING, 4, True)
    assert story.session.record.reason == "PNode b has been silent for 3.0 s; goes back to step 4"
    story.lose = nothing
    commands = story.tell(Offered(ONE))
    assert next(c for c in commands if isinstance(c, Publish)) == Publish("dcnr.pnode.b.cmd", Undeploy(SESSION, FIRST))
    deploy = story.sent(Deploy)[-1][1]
    assert isinstance(deploy, Deploy)
    assert (deploy.epoch, deploy.step, deploy.checkpoint) == (2, 4, "key4")
    assert (story.state, story.rows) == (S.DONE, trained(TWO, steps=8).rows)
    assert [(row.step, row.epoch) for row in story.measured(StepMetrics)] == [
        *((n, 1) for n in range(1, 6)),
        *((n, 2) for n in range(5, 9)),
    ]


def test_a_survivor_keeps_its_nodes_and_is_not_told_to_let_go() -> None:
    """Only what the lost PNode held moves."""
    story = running()
    before = dict(story.session.homes)
    story.tell(Lost(B, "gone"))
    assert story.session.uses(A, FIRST)
    story.tell(Offered((info("a"), info("c"))))
    assert {node: home for node, home in story.session.homes.items() if home == A} == {n: h for n, h in before.items() if h == A}
    assert [subject for subject, _ in story.sent(Undeploy)] == ["dcnr.pnode.b.cmd"]


def test_a_recovery_uses_fewer_pnodes_than_the_session_wants() -> None:
    """That many are wanted for a start; a recovery waits only if nothing fits, and goes on when something does."""
    story = running()
    story.session.record = replace(story.session.record, pnodes=2)
    story.tell(Lost(B, "gone"), Offered(()))
    assert (story.state, story.session.record.reason) == (S.WAITING, "it needs 1 PNode and 0 can take work; start one with `dcnr-agent`")
    story.tell(Offered(ONE))
    assert story.state is S.RUNNING


def test_a_pnode_lost_while_deploying_makes_the_session_be_placed_again(story: Story) -> None:
    """A first start still wants as many PNodes as it did."""
    story.session.record = replace(story.session.record, pnodes=2)
    story.lose = lambda event: isinstance(event, Deployed)
    story.tell(START, Offered(TWO), Lost(B, "PNode b was stopped"))
    assert (story.state, story.session.record.reason) == (S.WAITING, "PNode b was stopped")
    story.tell(Offered(ONE))
    assert "needs 2 PNodes and 1 can take work" in story.session.reason
    story.lose = nothing
    story.tell(Offered((info("a"), info("c"))))
    assert story.states[-1] == ("done", 4)


def test_a_failure_ends_the_session_with_the_pnode_and_its_message(story: Story) -> None:
    """Everyone lets go; the user reads one line."""
    story.lose = lambda event: isinstance(event, BatchRead)
    story.tell(START, Offered(TWO), Failed(PNodeId("b"), SESSION, Epoch(1), "node 'loss': broken", "Traceback"))
    assert (story.state, story.session.record.reason) == (S.FAILED, "PNode b: node 'loss': broken")
    assert story.pnodes.hosted == {}


def test_trouble_of_the_world_is_gone_back_from_three_times() -> None:
    """Without the PNode that had it, where that fits; a step that is done starts the count anew; the fourth time is the last."""
    story = running(checkpoint_every=1)
    lost = "the device is lost"

    def fail() -> None:
        story.tell(Failed(B, SESSION, story.session.record.epoch, lost, "Traceback", world=True))

    fail()
    assert story.session.record.reason == "PNode b: the device is lost; goes back to step 2"
    story.tell(Offered(TWO))
    assert story.session.hosts == {A}
    story.lose = lambda event: isinstance(event, BatchRead) and event.step > 3
    story.tell(BatchRead(SESSION, story.session.record.epoch, 3, tokens(7, 3, 4, 4)))
    assert (story.session.step, story.session.doubts.setbacks) == (3, 0)
    for _ in range(3):
        fail()
        story.tell(Offered(TWO))
    assert story.state is S.RUNNING
    fail()
    assert (story.states[-1], story.session.record.reason) == (("failed", 3), "PNode b: the device is lost")


def test_data_that_cannot_be_read_fails_the_session(story: Story) -> None:
    """The reason is the data's."""
    story.lose = lambda event: isinstance(event, BatchRead)
    story.tell(START, Offered(ONE), BatchFailed(SESSION, Epoch(1), 1, "train.bin is gone"))
    assert (story.state, story.session.record.reason) == (S.FAILED, "train.bin is gone")


@pytest.mark.parametrize("pnodes", [ONE, TWO])
def test_gradients_that_are_never_finite_fail_the_session(pnodes: PNodes) -> None:
    """Twenty skipped steps in a row without a smaller scale to try."""
    story = Story(record(steps=50), overflow=frozenset(range(1, 51)))
    story.tell(START, Offered(pnodes))
    assert story.state is S.FAILED
    assert "20 steps in a row, up to step 20, were not finite" in story.session.record.reason


def test_a_new_leader_ends_what_was_as_good_as_done() -> None:
    """Its PNodes have let go already, and the old leader could not write down that it was done."""
    story = trained(ONE, steps=4)
    written = [c.record for c in story.commands if isinstance(c, Store) and isinstance(c.record, SessionRecord)][-2]
    assert (written.state, written.step) == (S.RUNNING, 4)
    assignment = next(c.record for c in story.commands if isinstance(c, Store) and isinstance(c.record, AssignmentRecord))
    story.session = Session.taken_over(written, graph(), assignment, SETTINGS, story.now)
    story.now += 3.0
    story.tell(Tick())
    assert story.state is S.DONE


def test_words_of_an_older_epoch_are_dropped_and_counted(story: Story) -> None:
    """A zombie changes nothing."""
    story.lose = lambda event: isinstance(event, Deployed)
    story.tell(START, Offered(TWO))
    before = story.session.record
    assert story.tell(Failed(PNodeId("a"), SESSION, Epoch(0), "old", ""), Deployed(PNodeId("a"), SESSION, Epoch(2), 0, 1)) == []
    assert (story.session.record, story.session.fenced) == (before, 2)


def test_a_new_leader_ends_what_waits_with_nothing_left_to_do() -> None:
    """The last manifest was written, and the old leader did not hear of it; whoever watches is told."""
    last = CheckpointRecord(4, "key4", {"updates": 4, "loss_scale": 1.0, "good_steps": 4, "dynamic": False})
    waits = replace(record(steps=4), state=S.WAITING, reason="waits for PNodes", recovers=True, checkpoints=(last,))
    session = Session.taken_over(waits, graph(), None, SETTINGS, 0.0)
    session.validate()
    done = replace(waits, state=S.DONE, reason="", recovers=False, step=4)
    assert session.opening() == [Store(done), Measured(SessionMetrics(SESSION, "done", 4, ""))]


def test_a_first_start_that_a_new_leader_does_not_find_still_wants_as_many_pnodes() -> None:
    """Nothing was trained yet, so there is nothing to recover in a hurry."""
    story = Story(record(pnodes=2))
    story.lose = lambda event: isinstance(event, Deployed)
    story.tell(START, Offered(TWO))
    left = story.session
    assert (left.record.state, left.record.recovers) == (S.DEPLOYING, False)
    story.session = Session.taken_over(left.record, graph(), left.assignment, SETTINGS, story.now)
    story.beat(A)
    assert story.state is S.ADOPTING
    story.now += 3.0
    story.tell(Tick())
    assert (story.state, story.session.record.recovers) == (S.WAITING, False)
    story.tell(Offered(ONE))
    assert story.session.record.reason == "it needs 2 PNodes and 1 can take work; start one with `dcnr-agent`"
