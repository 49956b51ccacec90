"""One session on one PNode: events in, commands out."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np

from dcnr.agents.commands import Apply, Fold, Pass, SendHop, SendReport, Settle, Snapshot, Upload
from dcnr.agents.events import JobFailed, Settled, SnapshotTaken
from dcnr.agents.hosted import REMEMBERED, REPEAT_AFTER, TRANSITIONS, HostedSession, State
from dcnr.agents.plan import make_plan
from dcnr.agents.telemetry import IN_PLACE, Telemetry
from dcnr.bus.messages import (
    TRAINER,
    Decision,
    Deployed,
    Failed,
    Hop,
    Hosted,
    Loss,
    Saved,
    SaveFailed,
    StepDone,
    StepReport,
)
from dcnr.ids import NodeId
from dcnr.optim.hyper import SAVE_AFTER
from tests.agents.bench import GRAPH, PART, ROWS, SCALER, VERDICT, Bench, messages, only_on_b, through
from tests.agents.tiny import DIM, NETWORK, SEQ, SESSION, A, B, deploy_of

# -- alone -----------------------------------------------------------------------------------------------------------------


def test_a_whole_network_runs_step_after_step_without_asking(whole: Bench) -> None:
    """Fed three steps ahead: passes, settling, and a snapshot after step 2, all in one line."""
    assert whole.first == [SendReport(NETWORK, Deployed(A, SESSION, whole.session.deploy.epoch, 0, whole.session.bytes))]
    for step in (1, 2, 3):
        for micro in (0, 1):
            assert whole.feed(step, micro) == []
    kinds = [(type(job), getattr(job, "step", None)) for job in whole.jobs]
    assert kinds == [
        (Pass, 1), (Pass, 1), (Settle, 1),
        (Pass, 2), (Pass, 2), (Settle, 2), (Snapshot, 2),
        (Pass, 3), (Pass, 3), (Settle, 3),
    ]  # fmt: skip


def test_a_settled_step_is_said_with_its_loss(whole: Bench) -> None:
    """The loss is the sum over micro-batches in order, whatever order they come in."""
    for micro in (0, 1):
        whole.feed(1, micro)
    assert [type(job) for job in whole.jobs] == [Pass, Pass, Settle]
    losses = ((NodeId("loss"), 1, 0.2), (NodeId("loss"), 0, 0.1))
    commands = whole.session.settled(Settled(SESSION, whole.session.deploy.epoch, 1, VERDICT, 8.0, losses), 0.0)
    fields = {"updates": 1, "loss_scale": 1.0, "good_steps": 0, "dynamic": False}
    assert messages(commands) == [StepDone(A, SESSION, whole.session.deploy.epoch, 1, 0.1 + 0.2, 2.5, False, 0.1, 8.0, fields)]


def test_a_step_that_is_fed_again_is_said_again(whole: Bench) -> None:
    """A lost `StepDone` is sent once more when the trainer repeats itself, and nothing is computed twice."""
    whole.feed(1, 0)
    whole.feed(1, 1)
    assert len(whole.jobs) == 3
    said = messages(whole.session.settled(Settled(SESSION, whole.session.deploy.epoch, 1, VERDICT, 1.0, ()), 0.0))
    assert messages(whole.hop("fwd", (TRAINER, 0), (("embedder", 0),), (1, 0))) == said
    assert whole.hop("fwd", (TRAINER, 0), (("embedder", 0),), (1, 1)) == []
    assert whole.jobs == []
    assert whole.telemetry.dropped["stale"] == 2


def test_the_last_step_is_said_again_until_a_newer_one_is(whole: Bench) -> None:
    """A trainer that missed it, and so feeds nothing, hears it a second later."""
    for step in (1, 2):
        whole.feed(step, 0)
        whole.feed(step, 1)
        said = messages(whole.session.settled(Settled(SESSION, whole.session.deploy.epoch, step, VERDICT, 1.0, ()), float(step)))
        assert messages(whole.session.tick(step + REPEAT_AFTER)) == said
    assert whole.jobs


def test_only_the_last_steps_are_remembered(whole: Bench) -> None:
    """Memory is bounded."""
    for step in range(1, REMEMBERED + 2):
        whole.feed(step, 0)
        whole.feed(step, 1)
        assert whole.jobs
        whole.session.settled(Settled(SESSION, whole.session.deploy.epoch, step, VERDICT, 1.0, ()), 0.0)
    assert whole.hop("fwd", (TRAINER, 0), (("embedder", 0),), (1, 0)) == []
    assert messages(whole.hop("fwd", (TRAINER, 0), (("embedder", 0),), (2, 0)))


def test_nothing_begins_after_the_last_step() -> None:
    """Tensors of a step beyond the total run, but the step is not settled."""
    deploy = replace(deploy_of(dict.fromkeys(GRAPH.by_id, A)), total_steps=1)
    bench = Bench(deploy, A)
    for step in (1, 2):
        bench.feed(step, 0)
        bench.feed(step, 1)
    assert [type(job) for job in bench.jobs] == [Pass, Pass, Settle, Pass, Pass]


# -- with others -----------------------------------------------------------------------------------------------------------


def test_tensors_are_handed_on_as_hops(middle: Bench) -> None:
    """An activation to the slot that reads it, a gradient to the slot that made it, each with its step and micro-batch."""
    hops = [command for command in through(middle, 1) if isinstance(command, SendHop)]
    assert [(hop.to, hop.hop.phase, hop.hop.micro, hop.hop.source, hop.hop.source_slot, hop.hop.targets) for hop in hops] == [
        (A, phase, micro, *rest)
        for micro in (0, 1)
        for phase, rest in (("fwd", ("gelu", 0, (("down", 0),))), ("bwd", ("up", 0, (("residual", 0),))))
    ]
    assert {(hop.hop.sender, hop.hop.shape, hop.hop.attempt) for hop in hops} == {(B, (ROWS, SEQ, DIM), 0)}
    assert middle.telemetry.sent == {A: 4 * ROWS * SEQ * DIM * 4}


def test_a_step_is_folded_reported_decided_and_applied(middle: Bench) -> None:
    """The report is repeated until the decision; the apply and the copy that it asks for go first."""
    epoch = middle.session.deploy.epoch
    through(middle, 1)
    assert middle.jobs == [Fold(SESSION, epoch, 1, 0)]
    report = StepReport(B, SESSION, epoch, 1, 0, {"up": 2.0}, True, ())
    assert messages(middle.folded(1, now=10.0)) == [report]
    assert middle.session.deadline() == 10.0 + REPEAT_AFTER
    assert middle.session.tick(10.5) == []
    assert messages(middle.session.tick(11.0)) == [report]
    assert middle.decide(1, save=True) == []
    assert middle.session.deadline() is None
    assert middle.jobs == [Apply(SESSION, epoch, middle.decision(1, save=True)), Snapshot(SESSION, epoch, 1)]


def test_a_hop_of_the_next_step_waits_for_the_decision(middle: Bench) -> None:
    """It is taken, and runs behind the apply."""
    through(middle, 1)
    assert len(middle.jobs) == 1
    middle.hop("fwd", ("residual", 0), (("up", 0),), (2, 0))
    assert middle.jobs == []
    middle.folded(1)
    assert middle.jobs == []
    middle.decide(1, save=True)
    assert [type(job) for job in middle.jobs] == [Apply, Snapshot, Pass]


def test_a_decision_counts_once_and_only_for_the_reported_step(middle: Bench) -> None:
    """Too early, of another step, again, or with half a state: dropped and counted."""
    middle.decide(1)
    through(middle, 1)
    assert len(middle.jobs) == 1
    middle.decide(1)
    middle.folded(1)
    middle.decide(2)
    assert middle.telemetry.dropped == {"stale": 3}
    middle.session.decision(replace(middle.decision(1), state={"updates": 1}), 0.0)
    assert middle.telemetry.dropped["malformed"] == 1
    middle.decide(1)
    middle.decide(1)
    assert middle.telemetry.dropped["stale"] == 4
    assert [type(job) for job in middle.jobs] == [Apply]


def test_hops_that_come_twice_or_late_or_wrong_have_no_effect(middle: Bench) -> None:
    """Duplicate, of a step that is over, to a slot that is not here, of a wrong shape or dtype."""
    middle.hop("fwd", ("residual", 0), (("up", 0),), (1, 0))
    middle.hop("fwd", ("residual", 0), (("up", 0),), (1, 0))
    assert middle.telemetry.dropped == {"duplicate": 1}
    middle.hop("fwd", ("residual", 0), (("up", 0),), (0, 0))
    assert middle.telemetry.dropped["stale"] == 1
    middle.hop("fwd", ("residual", 0), (("down", 0),), (1, 1))
    middle.hop("bwd", ("residual", 0), (("gelu", 0),), (1, 1))
    assert middle.telemetry.dropped["unknown"] == 2
    for wrong in (np.zeros(1, np.float32), np.zeros((ROWS, SEQ, DIM), np.int64), np.zeros((ROWS, SEQ, DIM), np.float16)):
        about = (NodeId("residual"), 0, ((NodeId("up"), 0),), A, wrong.dtype.name, wrong.shape)
        middle.session.hop(Hop(NETWORK, SESSION, middle.session.deploy.epoch, 1, 1, 0, "fwd", *about), wrong)
    assert middle.telemetry.dropped["malformed"] == 3
    assert len(middle.jobs) == 1


def test_the_cost_says_the_loss_of_every_micro_batch() -> None:
    """A `Loss` at once, and all of them again in the report."""
    bench = Bench(deploy_of(only_on_b("loss")), B)
    epoch = bench.session.deploy.epoch
    logits = np.zeros((ROWS, SEQ, 17), np.float32)
    for micro in (0, 1):
        hop = Hop(NETWORK, SESSION, epoch, 1, micro, 0, "fwd", NodeId("lm_head"), 0, ((NodeId("loss"), 0),), A, "float32", logits.shape)
        bench.session.hop(hop, logits)
        bench.hop("fwd", (TRAINER, 1), (("loss", 1),), (1, micro), weight=0.5)
    first, second, fold = bench.jobs
    assert isinstance(first, Pass)
    assert isinstance(second, Pass)
    assert isinstance(fold, Fold)
    assert (first.weights, first.gradients) == ((0.0, 0.5), ())
    assert messages(bench.passed(first, gradients=1, loss=0.7)) == [Loss(B, SESSION, epoch, 1, 0, NodeId("loss"), 0, 0.7)]
    bench.passed(second, gradients=1, loss=0.8)
    (report,) = messages(bench.folded(1))
    assert isinstance(report, StepReport)
    assert report.losses == ((NodeId("loss"), 0, 0.7), (NodeId("loss"), 1, 0.8))


def test_segments_of_one_pnode_hand_over_in_place() -> None:
    """`a` with `up` elsewhere: the residual goes from its first segment to its second without a hop."""
    bench = Bench(deploy_of(only_on_b("up")), A)
    bench.feed(1, 0)
    (forward,) = bench.jobs
    assert isinstance(forward, Pass)
    assert bench.session.plan is not None
    outputs = bench.session.plan.routes.segments[0].outputs
    hops = [command for command in bench.passed(forward, outputs=len(outputs)) if isinstance(command, SendHop)]
    assert [hop.hop.targets for hop in hops] == [(("up", 0),)]
    assert bench.telemetry.received[IN_PLACE] == ROWS * SEQ * DIM * 4


# -- checkpoints -----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_uploaded_and_said(whole: Bench) -> None:
    """Asked for after the deploy: one snapshot however often it is asked for, then an upload, then `Saved`, and again on request."""
    epoch = whole.session.deploy.epoch
    assert whole.session.save(0) == []
    assert whole.session.save(0) == []
    assert whole.jobs == [Snapshot(SESSION, epoch, 0)]
    tensors = {"up.weight": np.zeros(3, np.float32)}
    (upload,) = whole.session.snapshot_taken(SnapshotTaken(SESSION, epoch, 0, tensors, SCALER))
    assert isinstance(upload, Upload)
    assert (upload.step, upload.tensors, upload.state) == (0, tensors, {"updates": 1, "loss_scale": 1.0, "good_steps": 0, "dynamic": False})
    assert whole.session.save(0) == []
    saved = Saved(A, SESSION, epoch, 0, PART, upload.state)
    assert messages(whole.session.copies.uploaded(0, PART, upload.state)) == [saved]
    assert messages(whole.session.save(0)) == [saved]
    assert whole.jobs == []


def test_a_save_of_another_step_is_dropped(middle: Bench) -> None:
    """Only the present state can be saved, and one of which there is a copy."""
    assert middle.session.save(5) == []
    assert middle.jobs == []
    assert middle.telemetry.dropped == {"stale": 1}


def test_an_older_copy_can_be_saved_while_training_goes_on(middle: Bench) -> None:
    """Its upload failed: it is uploaded again when it is asked for, though a later step was applied."""
    epoch = middle.session.deploy.epoch
    for step in (1, 2):
        through(middle, step)
        assert len(middle.jobs) == 1
        middle.folded(step)
        middle.decide(step, save=step == 1)
        assert [type(job) for job in middle.jobs][:1] == [Apply]
    (upload,) = middle.session.snapshot_taken(SnapshotTaken(SESSION, epoch, 1, {"up.weight": np.zeros(3, np.float32)}, SCALER))
    assert messages(middle.session.copies.upload_failed(1, "disk full")) == [SaveFailed(B, SESSION, epoch, 1, "disk full")]
    assert middle.session.state is State.STEPPING
    (again,) = middle.session.save(1)
    assert isinstance(upload, Upload)
    assert isinstance(again, Upload)
    assert (again.step, again.tensors) == (1, upload.tensors)


def test_who_does_not_decide_has_no_scaler_state(middle: Bench) -> None:
    """The trainer has it."""
    (upload,) = middle.session.snapshot_taken(SnapshotTaken(SESSION, middle.session.deploy.epoch, 1, {}, SCALER))
    assert isinstance(upload, Upload)
    assert upload.state is None


def test_who_decides_saves_after_so_much_work_if_no_steps_are_given() -> None:
    """30 seconds after the deploy, and 30 seconds after that; what the last decision says agrees."""
    bench = Bench(deploy_of(dict.fromkeys(GRAPH.by_id, A)), A)
    kinds = []
    for step, now in ((1, SAVE_AFTER - 1), (2, SAVE_AFTER), (3, SAVE_AFTER + 1), (4, 2 * SAVE_AFTER)):
        bench.feed(step, 0)
        bench.feed(step, 1)
        kinds.append([type(job) for job in bench.at(now)][2:])
        bench.session.settled(Settled(SESSION, bench.session.deploy.epoch, step, VERDICT, 1.0, ()), now)
        last = bench.session.hosted(sending=False).last
        assert last is not None
        assert last.save == (step in (2, 4))
    assert kinds == [[Settle], [Settle, Snapshot], [Settle], [Settle, Snapshot]]


def test_what_a_session_was_loaded_from_is_the_copy_to_go_back_to() -> None:
    """It can be saved again without the compute thread; from the seed there is none."""
    deploy = deploy_of(only_on_b("up", "gelu"), step=7, checkpoint="somewhere")
    session = HostedSession(B, deploy, Telemetry())
    session.prepared(make_plan(deploy, B))
    tensors = {"up.weight": np.zeros(3, np.float32)}
    session.installed(tensors, 0.0)
    copy = session.copies.get(7)
    assert copy is not None
    assert (copy.tensors, copy.state) == (tensors, None)
    (upload,) = session.save(7)
    assert isinstance(upload, Upload)
    assert session.next_job(0.0) is None


# -- heartbeats ------------------------------------------------------------------------------------------------------------


def test_a_heartbeat_says_what_was_decided_last(middle: Bench) -> None:
    """Nothing at first; then the decision as it came."""
    deploy = middle.session.deploy
    assert middle.session.hosted(sending=False) == Hosted(SESSION, deploy.epoch, 0, 2, middle.session.bytes)
    through(middle, 1)
    assert len(middle.jobs) == 1
    middle.folded(1)
    middle.decide(1)
    hosted = middle.session.hosted(sending=False)
    assert (hosted.step, hosted.last) == (1, middle.decision(1))


def test_where_steps_are_decided_here_a_heartbeat_says_what_is_settled(whole: Bench) -> None:
    """Three steps are given out and one is settled: that one, with all that another leader must know."""
    for step in (1, 2, 3):
        whole.feed(step, 0)
        whole.feed(step, 1)
    assert len(whole.jobs) == 10
    assert whole.session.hosted(sending=False).step == 0
    whole.session.settled(Settled(SESSION, whole.session.deploy.epoch, 1, VERDICT, 8.0, ((NodeId("loss"), 0, 0.5),)), 0.0)
    hosted = whole.session.hosted(sending=False)
    assert hosted.step == 1
    assert hosted.last == Decision(SESSION, whole.session.deploy.epoch, 1, False, 0.1, 1.0, 1.0, 0.5, 2.5, 8.0, asdict(SCALER), False)


def test_it_is_busy_while_there_is_something_to_compute_or_send(middle: Bench) -> None:
    """With a job ready, at work, and with a hop on its way; not while it waits for tensors or for the decision."""

    def busy() -> bool:
        return middle.session.hosted(sending=False).busy

    assert not busy()
    assert middle.session.hosted(sending=True).busy
    middle.hop("fwd", ("residual", 0), (("up", 0),), (1, 0))
    assert busy()
    assert len(middle.jobs) == 1
    assert busy()
    middle.answered(1)
    assert not busy()
    assert middle.session.hosted(sending=False).work == 1
    through(middle, 1, attempt=1)
    assert busy()
    middle.answered(1 + 2 * 2 + len(middle.jobs))
    middle.folded(1, attempt=1)
    assert not busy()
    assert middle.session.hosted(sending=False).work == 7


# -- states ----------------------------------------------------------------------------------------------------------------


def test_a_failure_is_repeated_and_stops_everything(middle: Bench) -> None:
    """No more work, and the failure is said every second and at every deploy."""
    middle.hop("fwd", ("residual", 0), (("up", 0),), (1, 0))
    failure = Failed(B, SESSION, middle.session.deploy.epoch, "boom", "trace", world=True)
    assert messages(middle.session.failed(JobFailed(SESSION, middle.session.deploy.epoch, "boom", "trace", True), 5.0)) == [failure]
    assert middle.session.failed(JobFailed(SESSION, middle.session.deploy.epoch, "again", "trace", False), 5.0) == []
    assert middle.jobs == []
    assert messages(middle.session.tick(6.0)) == [failure]
    assert messages(middle.session.deployed_again()) == [failure]
    assert middle.hop("fwd", ("residual", 0), (("up", 0),), (1, 1)) == []
    assert middle.folded(1) == []


def test_before_it_is_installed_nothing_is_taken() -> None:
    """Hops and saves are dropped, a repeated deploy is not answered yet, and it counts as busy."""
    telemetry = Telemetry()
    deploy = deploy_of(only_on_b("up", "gelu"))
    session = HostedSession(B, deploy, telemetry)
    assert session.state is State.PREPARING
    assert session.deployed_again() == []
    session.prepared(make_plan(deploy, B))
    assert session.deployed_again() == []
    hop = Hop(NETWORK, SESSION, deploy.epoch, 1, 0, 0, "fwd", NodeId("residual"), 0, ((NodeId("up"), 0),), A, "float32", (3, 5, 8))
    assert session.hop(hop, np.zeros((3, 5, 8), np.float32)) == []
    assert session.save(0) == []
    assert session.next_job(0.0) is None
    assert session.hosted(sending=False).busy
    assert telemetry.dropped == {"unknown": 1, "stale": 1}
    session.validate()


def test_every_state_can_fail_and_nothing_leaves_failure() -> None:
    """The table of transitions."""
    assert all(State.FAILED in after for state, after in TRANSITIONS.items() if state is not State.FAILED)
    assert TRANSITIONS[State.FAILED] == frozenset()
    assert TRANSITIONS.keys() == set(State)
