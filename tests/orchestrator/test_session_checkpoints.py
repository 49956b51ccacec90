"""The checkpoints of one session: saves, manifests, storage that refuses, and which ones stay."""

from __future__ import annotations

import pytest

from dcnr.bus.messages import Deployed, Save, Saved, SaveFailed, SessionMetrics, StepDone, Undeploy
from dcnr.ids import Epoch
from dcnr.orchestrator.commands import Prune, Publish, Store, WriteManifest
from dcnr.orchestrator.events import BatchRead, Lost, ManifestFailed, ManifestWritten, Offered, SessionEvent, Tick
from dcnr.orchestrator.state import CheckpointRecord, SessionState
from tests.orchestrator.fakes import SESSION, info, record
from tests.orchestrator.story import FIRST, ONE, START, SUSPEND, TWO, A, B, S, Story, nothing, running, tokens, trained


def test_save_is_repeated_until_every_part_is_there(story: Story) -> None:
    """The checkpoint of step 0 waits for a lost `Saved`, and asks only who has not answered."""
    story.lose = lambda event: isinstance(event, Saved) and event.pnode == "a"
    story.tell(START, Offered(TWO))
    assert story.states[-1][0] == "deploying"
    story.now, story.lose = 3.0, nothing
    first = story.tell(Tick())[0]
    assert first == Publish("dcnr.pnode.a.cmd", Save(SESSION, Epoch(1), 0))
    assert story.state is S.DONE


def test_checkpoints_come_every_so_many_steps_and_hold_the_scaler_state() -> None:
    """With one PNode its own state, with two the trainer's: equal either way."""
    alone, two = trained(ONE, steps=5, checkpoint_every=2), trained(TWO, steps=5, checkpoint_every=2)
    assert alone.kept == [2, 4, 5]
    assert alone.session.record.checkpoints == two.session.record.checkpoints
    assert [c.scaler["updates"] for c in two.session.record.checkpoints] == [2, 4, 5]


def test_a_last_step_that_is_a_checkpoint_anyway_is_saved_once() -> None:
    """One manifest per step."""
    story = trained(TWO, steps=4, checkpoint_every=2)
    assert [command.step for command in story.commands if isinstance(command, WriteManifest)] == [0, 2, 4]


def test_a_manifest_that_was_written_is_a_checkpoint_whatever_became_of_its_deployment() -> None:
    """The session stands at it, and goes back to it."""
    story = Story(record(steps=50, checkpoint_every=2))
    kept: list[SessionEvent] = []

    def keep(event: SessionEvent) -> bool:
        kept.extend([event] if isinstance(event, ManifestWritten) and event.checkpoint.step == 2 else [])
        return event in kept or (isinstance(event, BatchRead) and event.step > 3)

    story.lose = keep
    story.tell(START, Offered(TWO))
    story.tell(Lost(B, "gone"))
    assert (story.state, story.session.record.step) == (S.WAITING, 0)
    assert story.tell(*kept) == [Store(story.session.record)]
    assert (story.session.record.step, story.kept) == (2, [0, 2])
    story.tell(ManifestWritten(SESSION, Epoch(0), CheckpointRecord(9, "of another life", {})))
    assert story.session.record.step == 2


def test_storage_that_refuses_is_told_and_stops_nothing() -> None:
    """Training goes on; the trouble is over when a checkpoint is complete."""
    story = running(until=3, checkpoint_every=4)
    run = story.session.run
    assert run is not None
    run.checkpoints.expect(3, {}, story.now)
    story.tell(SaveFailed(A, SESSION, FIRST, 3, "the disk is full"))
    assert story.measured(SessionMetrics)[-1].reason == "PNode a could not save checkpoint 3, which is left out: the disk is full"
    story.lose = lambda event: isinstance(event, BatchRead) and event.step > 4
    story.tell(BatchRead(SESSION, FIRST, 4, tokens(7, 4, 4, 4)))
    assert (story.session.step, story.kept, story.session.reason) == (4, [0, 4], "")
    assert [c.steps for c in story.commands if isinstance(c, Prune)] == [(3,)]


def test_a_checkpoint_of_an_earlier_deployment_is_not_removed_with_what_a_later_one_gave_up() -> None:
    """It is complete, whatever came of saving it once more."""
    story = running(until=5, checkpoint_every=4)
    story.tell(Lost(B, "gone"))
    story.lose = lambda event: (isinstance(event, Saved) and event.step == 5) or (isinstance(event, BatchRead) and event.step > 5)
    story.tell(Offered(ONE))
    epoch = story.session.record.epoch
    at_5 = {"updates": 5, "loss_scale": 1.0, "good_steps": 5, "dynamic": False}
    story.tell(ManifestWritten(SESSION, FIRST, CheckpointRecord(5, "key5", at_5)))
    story.tell(SaveFailed(A, SESSION, epoch, 5, "the disk is full"))
    story.lose = lambda event: isinstance(event, BatchRead) and event.step > 8
    story.tell(*(BatchRead(SESSION, epoch, step, tokens(7, step, 4, 4)) for step in (6, 7, 8)))
    assert story.kept == [4, 5, 8]
    assert all(5 not in c.steps for c in story.commands if isinstance(c, Prune))


def test_a_manifest_that_cannot_be_written_is_tried_again(story: Story) -> None:
    """The session says why it is held up, and goes on when storage does."""
    story.lose = lambda event: isinstance(event, ManifestWritten)
    story.tell(START, Offered(TWO))
    story.tell(ManifestFailed(SESSION, Epoch(1), 0, "the disk is full"))
    assert "the manifest of checkpoint 0 could not be written, trying again: the disk is full" in story.session.reason
    story.lose, story.now = nothing, story.now + 2.0
    story.tell(Tick())
    assert (story.state, story.session.reason) == (S.DONE, "")


def test_a_checkpoint_waits_for_its_step() -> None:
    """Where the PNode decides alone its word of a step may be lost, and that of the checkpoint after it not: then it is asked for again."""
    story = running(ONE, until=3, checkpoint_every=4)
    story.lose = lambda event: (isinstance(event, StepDone) and event.step == 4) or (isinstance(event, BatchRead) and event.step > 4)
    story.tell(BatchRead(SESSION, FIRST, 4, tokens(7, 4, 4, 4)))
    assert (story.session.step, story.kept) == (3, [0])
    story.lose = lambda event: isinstance(event, BatchRead) and event.step > 4
    story.wait(3.0)
    assert (story.session.step, story.kept) == (4, [0, 4])


@pytest.mark.parametrize("suspended", [False, True])
def test_with_its_last_checkpoint_a_session_is_done_whatever_became_of_its_deployment(suspended: bool) -> None:
    """The PNode went before the last manifest was written: nothing is left to do."""
    story = Story(record(steps=4))
    story.lose = lambda event: isinstance(event, ManifestWritten) and event.checkpoint.step == 4
    story.tell(START, Offered(ONE), Lost(A, "killed"), *([SUSPEND] if suspended else []))
    assert (story.state, story.session.record.step) == (S.SUSPENDED if suspended else S.WAITING, 0)
    last = CheckpointRecord(4, "key4", {"updates": 4, "loss_scale": 1.0, "good_steps": 4, "dynamic": False})
    story.tell(ManifestWritten(SESSION, FIRST, last))
    assert story.state is S.DONE


@pytest.mark.parametrize(("state", "held_up"), [(S.DEPLOYING, Deployed), (S.RUNNING, BatchRead)])
def test_the_last_checkpoint_of_an_older_deployment_ends_the_one_that_was_to_train_it_again(state: SessionState, held_up: type) -> None:
    """Whoever holds the newer one lets go."""
    story = Story(record(steps=4))
    story.lose = lambda event: isinstance(event, ManifestWritten) and event.checkpoint.step == 4
    story.tell(START, Offered(ONE), Lost(A, "killed"))
    story.lose = lambda event: isinstance(event, held_up)
    story.tell(Offered((info("b"),)))
    assert (story.state, story.session.record.epoch, story.session.record.step) == (state, 2, 0)
    last = CheckpointRecord(4, "key4", {"updates": 4, "loss_scale": 1.0, "good_steps": 4, "dynamic": False})
    assert Publish("dcnr.pnode.b.cmd", Undeploy(SESSION, Epoch(2))) in story.tell(ManifestWritten(SESSION, FIRST, last))
    assert (story.states[-1], story.pnodes.hosted) == (("done", 4), {})
