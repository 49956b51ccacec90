"""One session that is suspended, resumed, moved, or asked for more steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dcnr.bus.messages import Deploy, Deployed, StepMetrics, StepReport, Undeploy
from dcnr.orchestrator.commands import SendHop, Store
from dcnr.orchestrator.events import BatchRead, Draining, Lost, Offered, SessionEvent, StartSession
from tests.orchestrator.fakes import SESSION, graph, record
from tests.orchestrator.story import FIRST, ONE, START, SUSPEND, TWO, B, PNodes, S, Story, nothing, running, trained


@pytest.mark.parametrize("pnodes", [ONE, TWO])
def test_suspend_finishes_what_is_in_flight_saves_and_lets_go(pnodes: PNodes) -> None:
    """The steps that had begun are done; none that had not begun is fed."""
    story = Story(record(steps=50))
    story.lose = lambda event: isinstance(event, BatchRead) and event.step > 3
    story.tell(START, Offered(pnodes))
    assert (story.state, story.session.step) == (S.RUNNING, 3)
    story.tell(SUSPEND)
    assert story.states[-2:] == [("suspending", 3), ("suspended", 3)]
    assert story.session.record.checkpoints[-1].step == 3
    assert story.pnodes.hosted == {}


def test_suspend_waits_for_the_step_that_has_begun(story: Story) -> None:
    """A report that is still to come holds the checkpoint back, and nothing new is fed meanwhile."""
    kept: list[SessionEvent] = []

    def keep(event: SessionEvent) -> bool:
        if isinstance(event, StepReport) and event.pnode == "b" and event.step == 2:
            kept.append(event)
            return True
        return False

    story.lose = keep
    story.tell(START, Offered(TWO))
    assert story.tell(SUSPEND)[0] == Store(replace(story.session.record, state=S.SUSPENDING, reason="suspended by request"))
    assert story.states[-1][0] == "suspending"
    fed = [command.hop.step for command in story.commands if isinstance(command, SendHop)]
    story.lose = nothing
    story.tell(*kept)
    assert story.state is S.SUSPENDED
    assert story.session.record.step == max(fed) == 3
    assert [command.hop.step for command in story.commands if isinstance(command, SendHop)] == [1] * 4 + [2] * 4 + [3] * 4


def test_resume_goes_on_from_the_checkpoint_with_other_pnodes() -> None:
    """Epoch + 1, the checkpoint's key, step and scaler; the losses are those of the run that never stopped."""
    whole = [row.loss for row in trained(TWO, steps=6).measured(StepMetrics)]
    story = Story(record(steps=6))
    story.lose = lambda event: isinstance(event, BatchRead) and event.step > 2
    story.tell(START, Offered(TWO))
    story.tell(SUSPEND)
    story.lose = nothing
    checkpoint = story.session.record.newest
    assert checkpoint is not None
    story.tell(StartSession(3, SESSION, graph(), checkpoint), Offered(ONE))
    deploy = story.sent(Deploy)[-1][1]
    assert isinstance(deploy, Deploy)
    assert (deploy.epoch, deploy.step, deploy.checkpoint, deploy.state) == (2, 2, "key2", checkpoint.scaler)
    assert [row.loss for row in story.measured(StepMetrics)] == whole
    assert story.state is S.DONE


def test_a_done_session_goes_on_when_asked_for_more_steps() -> None:
    """The new total counts; a total that is reached already is refused."""
    story = trained(ONE, steps=2)
    newest = story.session.record.newest
    assert "ask for more steps" in str(story.session.objection(StartSession(2, SESSION, graph(), newest)))
    story.tell(StartSession(2, SESSION, graph(), newest, steps=3), Offered(ONE))
    assert (story.state, story.session.record.step, story.session.record.steps) == (S.DONE, 3, 3)


def test_a_pnode_lost_while_suspending_leaves_the_session_at_its_last_checkpoint() -> None:
    """Nobody would train it further anyway."""
    story = Story(record(steps=50, checkpoint_every=2))
    story.lose = lambda event: isinstance(event, StepReport) and event.step > 4
    story.tell(START, Offered(TWO))
    story.tell(SUSPEND)
    assert story.state is S.SUSPENDING
    story.tell(Lost(B, "PNode b was stopped"))
    assert (story.state, story.session.record.step) == (S.SUSPENDED, 4)
    assert story.session.record.reason == "PNode b was stopped; the last checkpoint is of step 4"
    assert story.sent(Undeploy)[0] == ("dcnr.pnode.a.cmd", Undeploy(SESSION, FIRST))


def test_draining_moves_a_running_session_at_a_checkpoint() -> None:
    """It finishes what has begun, saves, and goes on elsewhere from there: no step is repeated."""
    story = running(steps=5)
    story.lose = nothing
    story.tell(Draining(B))
    assert story.session.record.reason == "moves away from PNode b; goes on from step 2"
    assert story.states[-2:] == [("running", 2), ("waiting", 2)]
    story.tell(Offered(ONE))
    assert (story.state, [row.step for row in story.measured(StepMetrics)]) == (S.DONE, [1, 2, 3, 4, 5])


def test_draining_while_deploying_places_anew(story: Story) -> None:
    """Nothing is worth saving yet."""
    story.lose = lambda event: isinstance(event, Deployed)
    story.tell(START, Offered(TWO), Draining(B))
    assert story.state is S.WAITING


def test_a_move_gives_way_to_a_request_to_suspend() -> None:
    """The checkpoint that is coming serves for both."""
    story = Story(record(steps=50))
    story.lose = lambda event: isinstance(event, StepReport) and event.step > 2
    story.tell(START, Offered(TWO))
    story.tell(Draining(B))
    assert (story.state, story.session.record.reason) == (S.RUNNING, "moves away from PNode b")
    story.lose = nothing
    story.tell(SUSPEND)
    story.wait(1.0)
    assert (story.state, story.session.record.reason) == (S.SUSPENDED, "suspended by request")
