"""A step that is begun again: nothing of an older attempt has any effect."""

from __future__ import annotations

import numpy as np

from dcnr.agents.commands import Abort, Apply, Fold, Pass, SendHop, Settle, Snapshot
from dcnr.agents.events import Settled
from dcnr.agents.hosted import REPEAT_AFTER, State
from dcnr.bus.messages import (
    TRAINER,
    Hop,
    Loss,
    StepDone,
    StepReport,
)
from dcnr.ids import NodeId
from tests.agents.bench import ROWS, VERDICT, Bench, messages, only_on_b, through
from tests.agents.tiny import NETWORK, SEQ, SESSION, A, B, deploy_of


def test_a_newer_attempt_begins_the_step_anew(middle: Bench) -> None:
    """After the report: what was computed is forgotten, the report is no more repeated, and the new report is of the new attempt."""
    epoch = middle.session.deploy.epoch
    through(middle, 1)
    assert len(middle.jobs) == 1
    middle.folded(1)
    hops = [command for command in through(middle, 1, attempt=1) if isinstance(command, SendHop)]
    assert {hop.hop.attempt for hop in hops} == {1}
    assert middle.session.deadline() is None
    assert middle.jobs == [Fold(SESSION, epoch, 1, 1)]
    assert messages(middle.folded(1, attempt=1)) == [StepReport(B, SESSION, epoch, 1, 1, {"up": 2.0}, True, ())]
    middle.decide(1)
    assert [type(job) for job in middle.jobs] == [Apply]
    assert middle.telemetry.dropped == {}


def test_answers_of_an_older_attempt_change_nothing(middle: Bench) -> None:
    """A pass that was at the compute thread: nothing it made is sent. Gradients folded before: they are not reported."""
    middle.hop("fwd", ("residual", 0), (("up", 0),), (1, 0))
    (old,) = middle.jobs
    middle.hop("fwd", ("residual", 0), (("up", 0),), (1, 0), attempt=1)
    assert isinstance(old, Pass)
    assert middle.passed(old, outputs=1) == []
    abort, new = middle.jobs
    assert abort == Abort(SESSION, middle.session.deploy.epoch, 1)
    assert isinstance(new, Pass)
    assert middle.passed(new, outputs=1)
    through(middle, 1, attempt=2)
    assert [type(job) for job in middle.jobs] == [Fold]
    assert middle.session.state is State.FOLDING
    assert middle.folded(1, attempt=1) == []
    assert middle.session.state is State.FOLDING
    assert messages(middle.folded(1, attempt=2))


def test_a_fold_that_waits_is_taken_back(middle: Bench) -> None:
    """The newer attempt came between the last backward and its folding."""
    through(middle, 1)
    middle.hop("fwd", ("residual", 0), (("up", 0),), (1, 0), attempt=1)
    assert [type(job) for job in middle.jobs] == [Abort, Pass]


def test_what_is_to_be_done_of_the_step_before_stays(middle: Bench) -> None:
    """An apply and a copy wait for the compute thread when the next step begins anew: they go before it is forgotten."""
    through(middle, 1)
    assert len(middle.jobs) == 1
    middle.folded(1)
    middle.decide(1, save=True)
    middle.hop("fwd", ("residual", 0), (("up", 0),), (2, 0))
    assert isinstance(middle.session.next_job(0.0), Apply)
    middle.hop("fwd", ("residual", 0), (("up", 0),), (2, 0), attempt=1)
    assert [type(job) for job in middle.jobs] == [Snapshot, Pass]


def test_a_hop_of_an_older_attempt_is_stale(middle: Bench) -> None:
    """Nothing of it is mixed with the newer one."""
    middle.hop("fwd", ("residual", 0), (("up", 0),), (1, 1), attempt=1)
    middle.hop("fwd", ("residual", 0), (("up", 0),), (1, 0))
    assert middle.telemetry.dropped == {"stale": 1}
    assert middle.jobs == []


def test_a_step_of_which_nothing_was_done_needs_no_abort(middle: Bench) -> None:
    """What waited is forgotten, and the compute thread has nothing to forget."""
    middle.hop("fwd", ("residual", 0), (("up", 0),), (1, 1))
    middle.hop("fwd", ("residual", 0), (("up", 0),), (1, 0), attempt=1)
    (only,) = middle.jobs
    assert isinstance(only, Pass)
    assert (only.micro, only.attempt) == (0, 1)
    assert middle.jobs == []


def test_a_malformed_hop_begins_nothing_anew(middle: Bench) -> None:
    """Of a newer attempt, but of a wrong shape, or for a slot that is not here."""
    middle.hop("fwd", ("residual", 0), (("up", 0),), (1, 0))
    wrong = np.zeros(1, np.float32)
    about = (NodeId("residual"), 0, ((NodeId("up"), 0),), A, wrong.dtype.name, wrong.shape)
    middle.session.hop(Hop(NETWORK, SESSION, middle.session.deploy.epoch, 1, 0, 5, "fwd", *about), wrong)
    middle.hop("fwd", ("residual", 0), (("down", 0),), (1, 0), attempt=5)
    assert middle.session.hosted(sending=False).attempt == 0
    assert len(middle.jobs) == 1


def test_a_later_step_may_come_with_an_attempt_while_a_decision_is_awaited(middle: Bench) -> None:
    """As after a change of the leader: it waits, nothing of the reported step changes, and the attempt is what heartbeats say."""
    through(middle, 1)
    assert len(middle.jobs) == 1
    (report,) = messages(middle.folded(1, now=3.0))
    middle.hop("fwd", ("residual", 0), (("up", 0),), (2, 0))
    middle.hop("fwd", ("residual", 0), (("up", 0),), (2, 0), attempt=4)
    assert messages(middle.session.tick(3.0 + REPEAT_AFTER)) == [report]
    assert middle.session.hosted(sending=False).attempt == 4
    middle.decide(1)
    apply, forward = middle.jobs
    assert isinstance(apply, Apply)
    assert isinstance(forward, Pass)
    assert (forward.step, forward.attempt) == (2, 4)
    hosted = middle.session.hosted(sending=False)
    assert (hosted.step, hosted.attempt) == (1, 4)


def test_losses_of_an_older_attempt_are_not_reported() -> None:
    """The cost had both micro-batches of attempt 0; the report of attempt 1 has only its own."""
    bench = Bench(deploy_of(only_on_b("loss")), B)
    logits = np.zeros((ROWS, SEQ, 17), np.float32)
    for attempt, losses in ((0, (0.1, 0.2)), (1, (0.7, 0.8))):
        for micro, loss in enumerate(losses):
            about = (NodeId("lm_head"), 0, ((NodeId("loss"), 0),), A, "float32", logits.shape)
            bench.session.hop(Hop(NETWORK, SESSION, bench.session.deploy.epoch, 1, micro, attempt, "fwd", *about), logits)
            bench.hop("fwd", (TRAINER, 1), (("loss", 1),), (1, micro), attempt=attempt, weight=0.5)
            *_, forward = [job for job in bench.jobs if isinstance(job, Pass)]
            (said,) = messages(bench.passed(forward, gradients=1, loss=loss))
            assert isinstance(said, Loss)
            assert (said.attempt, said.loss) == (attempt, loss)
    (report,) = messages(bench.folded(1, attempt=1))
    assert isinstance(report, StepReport)
    assert report.losses == ((NodeId("loss"), 0, 0.7), (NodeId("loss"), 1, 0.8))


def test_where_steps_are_decided_here_only_the_one_under_way_begins_anew(whole: Bench) -> None:
    """Step 1 is given out: it stays, whatever comes; step 2 is half done: it begins anew."""
    for micro in (0, 1):
        whole.feed(1, micro)
    whole.feed(2, 0)
    assert [type(job) for job in whole.jobs] == [Pass, Pass, Settle, Pass]
    for micro in (0, 1):
        whole.hop("fwd", (TRAINER, 0), (("embedder", 0),), (1, micro), attempt=1)
    assert whole.jobs == []
    whole.session.settled(Settled(SESSION, whole.session.deploy.epoch, 1, VERDICT, 1.0, ()), 0.0)
    (again,) = messages(whole.hop("fwd", (TRAINER, 0), (("embedder", 0),), (1, 0), attempt=2))
    assert isinstance(again, StepDone)
    deadline = whole.session.deadline()
    for micro in (0, 1):
        whole.hop("fwd", (TRAINER, 0), (("embedder", 0),), (2, micro), attempt=1)
        whole.hop("fwd", (TRAINER, 1), (("loss", 1),), (2, micro), attempt=1)
    assert [(type(job), getattr(job, "attempt", None)) for job in whole.jobs] == [
        (Abort, None), (Pass, 1), (Pass, 1), (Settle, None), (Snapshot, None),
    ]  # fmt: skip
    assert whole.session.deadline() == deadline
