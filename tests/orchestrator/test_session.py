"""One session: events in, commands out, against PNodes that follow the protocol."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from dcnr.bus.messages import (
    Decision,
    Deploy,
    Deployed,
    Failed,
    Hosted,
    Loss,
    Refused,
    Save,
    Saved,
    SaveFailed,
    SessionMetrics,
    StepDone,
    StepMetrics,
    StepReport,
    Undeploy,
)
from dcnr.ids import Epoch, PNodeId
from dcnr.orchestrator.commands import Prune, Publish, SendHop, Store, WriteManifest
from dcnr.orchestrator.events import (
    BatchFailed,
    BatchRead,
    Draining,
    Lost,
    ManifestFailed,
    ManifestWritten,
    Offered,
    RebalanceSession,
    SessionEvent,
    Standing,
    StartSession,
    Tick,
)
from dcnr.orchestrator.session import TRANSITIONS, Session
from dcnr.orchestrator.state import AssignmentRecord, CheckpointRecord, SessionRecord, SessionState
from tests.orchestrator.fakes import SESSION, graph, info, part, record
from tests.orchestrator.story import (
    FIRST,
    ONE,
    SETTINGS,
    START,
    SUSPEND,
    THREE,
    TWO,
    A,
    B,
    C,
    PNodes,
    S,
    Story,
    nothing,
    running,
    tokens,
    trained,
)


@pytest.fixture
def story() -> Story:
    """Four steps of two micro-batches."""
    return Story(record())


@pytest.mark.parametrize("pnodes", [ONE, TWO, THREE])
def test_a_session_goes_from_its_seed_to_done(pnodes: PNodes) -> None:
    """Every state in order, step 0 and the last step saved, every step measured once, everyone let go."""
    story = trained(pnodes)
    assert story.states == [("waiting", 0), ("deploying", 0), ("running", 0), ("done", 4)]
    assert [row.step for row in story.measured(StepMetrics)] == [1, 2, 3, 4]
    assert [c.step for c in story.session.record.checkpoints] == [0, 4]
    assert len(story.sent(Undeploy)) == len(pnodes)
    assert story.pnodes.hosted == {}
    assert (story.session.record.step, story.session.record.loss) == (4, story.measured(StepMetrics)[-1].loss)


def test_losses_do_not_depend_on_placement() -> None:
    """One, two and three PNodes: the same numbers to the last bit, whoever decides."""
    runs = [trained(pnodes).measured(StepMetrics) for pnodes in (ONE, TWO, THREE)]
    rows = [[(r.step, r.loss, r.lr, r.loss_scale, r.skipped) for r in run] for run in runs]
    assert rows[0] == rows[1] == rows[2]
    assert len({loss for _, loss, _, _, _ in rows[0]}) > 1


def test_hops_carry_rows_weight_and_slots() -> None:
    """Ids for the embedder, then targets for the cost, micro-batch by micro-batch; the weight counts the whole step."""
    story = trained(TWO, steps=1)
    hops = [command for command in story.commands if isinstance(command, SendHop)]
    assert [(c.hop.step, c.hop.micro, c.hop.source_slot, c.hop.targets) for c in hops] == [
        (1, 0, 0, (("embed", 0),)), (1, 0, 1, (("loss", 1),)), (1, 1, 0, (("embed", 0),)), (1, 1, 1, (("loss", 1),)),
    ]  # fmt: skip
    assert {c.hop.weight for c in hops if c.hop.source_slot == 1} == {1 / 16}
    batch = tokens(7, 1, 4, 4)
    np.testing.assert_array_equal(hops[2].payload, batch[2:, :-1])
    np.testing.assert_array_equal(hops[3].payload, batch[2:, 1:])
    assert hops[0].hop.shape == (2, 4)
    assert hops[0].hop.dtype == "int64"


def test_deploy_carries_everything_a_pnode_needs(story: Story) -> None:
    """Each host gets the same deploy, with the hyper-parameters and scaler fields it will decide and update by."""
    story.lose = lambda event: isinstance(event, Deployed)
    story.tell(START, Offered(TWO))
    subjects = [subject for subject, _ in story.sent(Deploy)]
    assert subjects == ["dcnr.pnode.a.cmd", "dcnr.pnode.b.cmd"]
    deploy = story.sent(Deploy)[0][1]
    assert isinstance(deploy, Deploy)
    assert (deploy.epoch, deploy.step, deploy.checkpoint, deploy.decides, deploy.peers) == (1, 0, None, False, TWO)
    assert set(deploy.assignment) == {node.id for node in graph().nodes}
    assert deploy.state == {"updates": 0, "loss_scale": 1.0, "good_steps": 0, "dynamic": False}


def test_deploy_is_repeated_every_two_seconds_to_those_who_have_not_answered(story: Story) -> None:
    """A lost answer costs two seconds, not the session."""
    story.lose = lambda event: isinstance(event, Deployed) and event.pnode == "b"
    story.tell(START, Offered(TWO))
    assert story.session.deadline() == pytest.approx(2.02)
    assert story.tell(Tick()) == []
    story.now = 2.02
    story.lose = nothing
    repeated = story.tell(Tick())[0]
    assert isinstance(repeated, Publish)
    assert (repeated.subject, type(repeated.message)) == ("dcnr.pnode.b.cmd", Deploy)
    assert story.state is S.DONE


def test_save_is_repeated_until_every_part_is_there(story: Story) -> None:
    """The checkpoint of step 0 waits for a lost `Saved`, and asks only who has not answered."""
    story.lose = lambda event: isinstance(event, Saved) and event.pnode == "a"
    story.tell(START, Offered(TWO))
    assert story.states[-1][0] == "deploying"
    story.now, story.lose = 3.0, nothing
    first = story.tell(Tick())[0]
    assert first == Publish("dcnr.pnode.a.cmd", Save(SESSION, Epoch(1), 0))
    assert story.state is S.DONE


def test_a_refusal_makes_the_session_wait_with_the_numbers(story: Story) -> None:
    """A later offer is tried with the next epoch; who takes no part in that one lets go."""
    story.lose = lambda event: isinstance(event, Deployed)
    story.tell(START, Offered(TWO), Refused(PNodeId("b"), SESSION, Epoch(1), "needs 3 GiB, has 1 GiB"))
    assert (story.state, story.session.record.reason) == (S.WAITING, "PNode b refused: needs 3 GiB, has 1 GiB")
    assert story.sent(Undeploy) == []
    story.lose = nothing
    story.tell(Offered((info("b"), info("c"))))
    assert story.sent(Undeploy)[0] == ("dcnr.pnode.a.cmd", Undeploy(SESSION, Epoch(1)))
    assert (story.state, story.session.record.epoch) == (S.DONE, 2)


def test_a_session_waits_for_as_many_pnodes_as_it_wants() -> None:
    """The reason says how many; it is told once, and the session goes on when they are there."""
    story = Story(record(pnodes=2))
    story.tell(START, Offered(ONE), Offered(ONE))
    assert "needs 2 PNodes and 1 can take work" in story.session.record.reason
    assert story.states == [("waiting", 0), ("waiting", 0)]
    story.tell(Offered(THREE))
    assert story.state is S.DONE
    assert {subject for subject, _ in story.sent(Deploy)} == {"dcnr.pnode.a.cmd", "dcnr.pnode.b.cmd"}


def test_a_network_that_fits_nowhere_waits_and_says_what_it_needs(story: Story) -> None:
    """The numbers of placement reach the user."""
    story.tell(START, Offered((info("a", memory=100),)))
    assert story.state is S.WAITING
    assert "small" in story.session.record.reason or "embed" in story.session.record.reason


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
    assert (story.session.step, story.session.setbacks) == (3, 0)
    for _ in range(3):
        fail()
        story.tell(Offered(TWO))
    assert story.state is S.RUNNING
    fail()
    assert (story.states[-1], story.session.record.reason) == (("failed", 3), "PNode b: the device is lost")


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


def test_an_overflow_skips_the_step_everywhere_and_halves_the_scale() -> None:
    """Counted as a step, not as an update."""
    story = Story(record(steps=3, loss_scale=8.0), overflow=frozenset({2}))
    story.tell(START, Offered(TWO))
    decisions = [message for _, message in story.sent(Decision)]
    assert [(d.step, d.skip, d.state["updates"], d.state["loss_scale"]) for d in decisions if isinstance(d, Decision)] == [
        (1, False, 1, 8.0), (2, True, 1, 4.0), (3, False, 2, 4.0),
    ]  # fmt: skip
    assert [(row.loss_scale, row.skipped) for row in story.measured(StepMetrics)] == [(8.0, False), (8.0, True), (4.0, False)]


def test_a_repeated_report_of_a_decided_step_gets_the_decision_again() -> None:
    """A PNode that missed the decision is not left behind."""
    story = Story(record(steps=50))
    story.lose = lambda event: isinstance(event, BatchRead) and event.step > 2
    story.tell(START, Offered(TWO))
    decision = story.sent(Decision)[-1][1]
    again = StepReport(PNodeId("a"), SESSION, Epoch(1), 2, 0, {}, True, ())
    assert story.tell(again) == [Publish("dcnr.net.small.step", decision)]  # type: ignore[arg-type]
    assert story.session.step == 2


def test_lost_losses_are_taken_from_the_reports() -> None:
    """The loss of a step is complete although no `Loss` message came, as long as the window lets the step be fed."""
    story = Story(record(micro_batches=2))
    story.lose = lambda event: isinstance(event, Loss)
    story.tell(START, Offered(TWO))
    assert [row.loss for row in story.measured(StepMetrics)] == [row.loss for row in trained(TWO).measured(StepMetrics)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("pnodes", [ONE, THREE])
def test_order_and_repetition_of_messages_change_no_number(pnodes: PNodes, seed: int) -> None:
    """Reports, batches and manifests in any order, some of them twice: every step once, with the losses of the quiet run."""
    quiet = trained(pnodes, steps=6, micro_batches=4, checkpoint_every=2)
    wild = Story(record(steps=6, micro_batches=4, checkpoint_every=2), rng=np.random.default_rng(seed))
    wild.tell(START)
    wild.tell(Offered(pnodes))
    assert wild.state is S.DONE
    numbers = [[(row.step, row.loss, row.grad_norm) for row in story.measured(StepMetrics)] for story in (wild, quiet)]
    if pnodes == ONE:  # a step's word may be overtaken by the next one's; what comes is right
        assert set(numbers[0]) <= set(numbers[1])
    else:
        assert numbers[0] == numbers[1]
    assert wild.session.record.checkpoints[-1] == quiet.session.record.checkpoints[-1]


def test_micro_batches_in_flight_are_bounded() -> None:
    """Segments + 1 of them; a loss opens the window by one."""
    story = Story(record(steps=50, micro_batches=4))
    kept: list[SessionEvent] = []

    def keep(event: SessionEvent) -> bool:
        kept.extend([event] if isinstance(event, Loss) else [])
        return isinstance(event, Loss | StepReport)

    story.lose = keep
    story.tell(START, Offered(TWO))
    fed = {(command.hop.step, command.hop.micro) for command in story.commands if isinstance(command, SendHop)}
    assert fed == {(1, 0), (1, 1), (1, 2)}
    story.tell(kept[0])
    assert len([command for command in story.commands if isinstance(command, SendHop)]) == 8


def test_a_pnode_that_decides_is_fed_three_steps_ahead() -> None:
    """No round trip between steps; no loss message is awaited."""
    story = Story(record(steps=50))
    story.lose = lambda event: not isinstance(event, BatchRead | Deployed | Saved | ManifestWritten)
    story.tell(START, Offered(ONE))
    assert {command.hop.step for command in story.commands if isinstance(command, SendHop)} == {1, 2, 3}


def test_words_of_an_older_epoch_are_dropped_and_counted(story: Story) -> None:
    """A zombie changes nothing."""
    story.lose = lambda event: isinstance(event, Deployed)
    story.tell(START, Offered(TWO))
    before = story.session.record
    assert story.tell(Failed(PNodeId("a"), SESSION, Epoch(0), "old", ""), Deployed(PNodeId("a"), SESSION, Epoch(2), 0, 1)) == []
    assert (story.session.record, story.session.fenced) == (before, 2)


def test_a_manifest_that_cannot_be_written_is_tried_again(story: Story) -> None:
    """The session says why it is held up, and goes on when storage does."""
    story.lose = lambda event: isinstance(event, ManifestWritten)
    story.tell(START, Offered(TWO))
    story.tell(ManifestFailed(SESSION, Epoch(1), 0, "the disk is full"))
    assert "the manifest of checkpoint 0 could not be written, trying again: the disk is full" in story.session.reason
    story.lose, story.now = nothing, story.now + 2.0
    story.tell(Tick())
    assert (story.state, story.session.reason) == (S.DONE, "")


def test_step_times_are_measured_between_completions(story: Story) -> None:
    """tokens/s is the step's tokens over that time."""
    story.tell(START, Offered(TWO))
    for row in story.measured(StepMetrics):
        assert row.step_ms > 0
        assert row.tokens_per_s == pytest.approx(16 / row.step_ms * 1000)


def everything() -> Iterator[SessionEvent]:
    """One of each event, of the present epoch."""
    a, one = A, FIRST
    yield from (
        START,
        SUSPEND,
        RebalanceSession(3, SESSION),
        Offered(ONE),
        Offered(THREE),
        Offered(()),
        Lost(a, "gone"),
        Draining(a),
        Tick(),
    )
    for hosted in (None, Hosted(SESSION, one, 0, 1, 1), Hosted(SESSION, Epoch(9), 0, 1, 1)):
        yield Standing(info("a"), hosted)
    yield from (
        Deployed(a, SESSION, one, 0, 1),
        Refused(a, SESSION, one, "full"),
        Refused(a, SESSION, one, "bad sha256", damaged=True),
        SaveFailed(a, SESSION, one, 0, "the disk is full"),
        Failed(a, SESSION, one, "the device is lost", "", world=True),
        Loss(a, SESSION, one, 1, 0, graph().nodes[-1].id, 0, 1.0),
        Failed(a, SESSION, one, "bad", ""),
    )
    yield from (StepReport(a, SESSION, one, 1, 0, {}, True, ()), Saved(a, SESSION, one, 0, part(a, SESSION, 0), None))
    yield from (BatchRead(SESSION, one, 1, tokens(0, 1, 4, 4)), BatchFailed(SESSION, one, 1, "gone"))
    yield from (ManifestWritten(SESSION, one, CheckpointRecord(0, "k", {})), ManifestFailed(SESSION, one, 0, "full"))


def in_state(state: SessionState) -> Story:
    """A story that has come to `state`."""
    story = Story(record(steps=50) if state is not S.DONE else record(steps=1))
    if state in (S.DEPLOYING, S.SUSPENDED, S.FAILED):
        story.lose = lambda event: isinstance(event, Deployed)
    elif state is not S.DONE:
        story.lose = lambda event: isinstance(event, StepReport)
    match state:
        case S.CREATED:
            return story
        case S.ADOPTING:
            story.tell(START, Offered(TWO))
            left = story.session
            story.session = Session.taken_over(left.record, graph(), left.assignment, SETTINGS, story.now)
        case S.WAITING:
            story.tell(START)
        case S.SUSPENDED | S.SUSPENDING:
            story.tell(START, Offered(TWO))
            story.tell(SUSPEND)
        case S.FAILED:
            story.tell(START, Offered(TWO), Failed(PNodeId("a"), SESSION, Epoch(1), "bad", ""))
        case _:
            story.tell(START, Offered(TWO))
    assert story.state is state
    return story


@pytest.mark.parametrize("state", list(SessionState))
@pytest.mark.parametrize("event", list(everything()), ids=lambda event: type(event).__name__)
def test_every_event_in_every_state_keeps_to_the_table(state: SessionState, event: SessionEvent) -> None:
    """No event breaks the machine, and states change only as the table says."""
    story = in_state(state)
    story.lose = lambda _event: True
    story.commands.clear()
    story.tell(event)
    path = [str(state), *(told for told, _ in story.states)]
    assert all(after == before or after in TRANSITIONS[SessionState(before)] for before, after in pairwise(path)), path


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
