"""The steps of one deployment, where a session's story does not reach."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dcnr.bus.messages import Decision, Loss, StepDone, StepMetrics, StepReport
from dcnr.ids import Epoch, NetworkId, NodeId, PNodeId
from dcnr.optim.decide import ScalerState
from dcnr.optim.hyper import Hyper
from dcnr.orchestrator.commands import Command, Measured, Publish, ReadBatch, SendHop
from dcnr.orchestrator.feed import Address, Feeds
from dcnr.orchestrator.trainer import HOPELESS_STEPS, Plan, Trainer, scaler_fields, scaler_of, step_loss
from tests.orchestrator.fakes import SESSION

X, Y = NodeId("x"), NodeId("y")
A, B = PNodeId("a"), PNodeId("b")
QUIET = Hyper(checkpoint_every=0)


def trainer(decides: bool = False, steps: int = 100, hyper: Hyper = QUIET) -> Trainer:
    """Two costs on two PNodes (or one), two micro-batches."""
    homes = {X: A, Y: A if decides else B}
    address = Address(NetworkId("n"), SESSION, Epoch(1), PNodeId("t"), homes)
    feeds = Feeds(((X, 0),), ((X, 1), (Y, 1)), 3)
    plan = Plan(address, feeds, (X, Y), (X, Y), hyper, "text", 0, steps, 4, 2, 3, decides)
    return Trainer(plan, 0, ScalerState(), 0.0)


def report(pnode: PNodeId, step: int, norms: dict[str, float], finite: bool = True, attempt: int = 0) -> StepReport:
    """A PNode's report, with the losses of the cost that it holds."""
    cost = X if pnode == A else Y
    return StepReport(pnode, SESSION, Epoch(1), step, attempt, norms, finite, ((cost, 1, 2.0), (cost, 0, 1.0)))


def loss_of(step: int, micro: int, cost: NodeId = X, attempt: int = 0) -> Loss:
    """A micro-batch reached a cost."""
    return Loss(A, SESSION, Epoch(1), step, attempt, cost, micro, 1.0)


def batch(step: int) -> tuple[int, np.ndarray]:
    """The ids of a step."""
    return step, np.arange(16, dtype=np.int64).reshape(4, 4) + step


def fed(commands: list[Command]) -> list[tuple[int, int, int]]:
    """(step, micro-batch, attempt) of everything that is fed, once for both hops."""
    return sorted({(c.hop.step, c.hop.micro, c.hop.attempt) for c in commands if isinstance(c, SendHop)})


def metrics(commands: list[Command]) -> list[StepMetrics]:
    """The rows."""
    return [c.metric for c in commands if isinstance(c, Measured) and isinstance(c.metric, StepMetrics)]


def last(step: int, save: bool = False) -> Decision:
    """An earlier trainer's decision."""
    return Decision(
        SESSION, Epoch(1), step, False, 0.1, 1.0, 1.0, 2.5, 0.5, 8.0, scaler_fields(ScalerState(step, 8.0, step, True)), save
    )  # fmt: skip


def done(step: int, skipped: bool = False) -> StepDone:
    """The word of a PNode that decides."""
    return StepDone(A, SESSION, Epoch(1), step, 1.5, 1.0, skipped, 0.1, 1.0, scaler_fields(ScalerState(updates=step)))


def test_losses_are_summed_over_micro_batches_and_then_over_costs() -> None:
    """In that order whatever order they came in: floating-point sums differ otherwise."""
    losses = {(Y, 1): 1e16, (X, 1): 1.0, (Y, 0): -1e16, (X, 0): 0.5}
    assert step_loss(losses, (X, Y)) == (0.5 + 1.0) + (-1e16 + 1e16)
    assert step_loss({}, (X,)) == 0


def test_squared_norms_are_summed_in_node_order_whoever_reports_first() -> None:
    """The norm is that of one PNode."""
    one, other = trainer(), trainer()
    commands = [t.reported(report(p, 1, {x: v}), 1.0) for t, pairs in (
        (one, ((A, "x", 3.0), (B, "y", 1e-17))), (other, ((B, "y", 1e-17), (A, "x", 3.0))),
    ) for p, x, v in pairs]  # fmt: skip
    assert commands[0] == commands[2] == []
    assert commands[1] == commands[3]
    assert isinstance(commands[1][0], Publish)


def test_one_infinite_part_makes_every_vnode_skip() -> None:
    """Finite is finite everywhere."""
    one = trainer()
    one.reported(report(A, 1, {"x": 1.0}), 1.0)
    commands = one.reported(report(B, 1, {"y": 1.0}, finite=False), 1.0)
    assert isinstance(commands[1], Measured)
    assert commands[1].metric.skipped  # type: ignore[union-attr]
    assert (one.done, one.scaler.updates, one.skipped_in_a_row) == (1, 0, 1)


def test_reports_of_strangers_and_of_other_steps_are_ignored() -> None:
    """Only the step that is to be decided, only PNodes that take part."""
    one = trainer()
    assert one.reported(report(A, 2, {}), 1.0) == []
    assert one.reported(report(PNodeId("c"), 1, {}), 1.0) == []
    assert one.lost(Loss(A, SESSION, Epoch(1), 9, 0, X, 0, 1.0)) == []
    assert one.decided(done(1), 1.0) == []
    assert one.done == 0


def test_batches_are_asked_for_once_and_ahead_of_need() -> None:
    """One more than may be fed."""
    one = trainer()
    assert [c.step for c in one.pump() if isinstance(c, ReadBatch)] == [1, 2, 3]
    assert one.pump() == []


def test_a_step_done_that_was_lost_is_asked_for_and_taken_in_order() -> None:
    """Its step is fed again, so that the PNode says it again; no row is missing in the end."""
    one = trainer(decides=True)
    one.pump()
    for step in (1, 2, 3):
        one.batch_read(*batch(step))
    commands = one.decided(done(2), 1.0)
    assert (one.done, metrics(commands), fed(commands)) == (0, [], [(1, 0, 0)])
    rows = metrics(one.decided(done(1), 2.0))
    assert [(row.step, row.step_ms) for row in rows] == [(1, 1000.0), (2, 1000.0)]
    assert one.done == 2
    assert one.decided(done(1), 3.0) == []


def test_training_is_hopeless_only_after_many_skips_in_a_row() -> None:
    """One good step starts the count anew."""
    one = trainer(decides=True)
    for step in range(1, HOPELESS_STEPS):
        one.decided(done(step, skipped=True), float(step))
    one.decided(done(HOPELESS_STEPS), 100.0)
    assert one.hopeless is None
    assert one.skipped_in_a_row == 0


def test_stop_before_anything_was_fed_ends_at_the_last_decided_step() -> None:
    """Nothing is in flight, so nothing is waited for."""
    one = trainer()
    one.stop()
    assert one.idle


def test_scaler_states_travel_unchanged() -> None:
    """Fields and back."""
    state = ScalerState(3, 1024.0, 2, True)
    assert scaler_of(scaler_fields(state)) == state


def test_a_step_that_is_fed_again_has_the_next_attempt_and_later_ones_keep_theirs() -> None:
    """What is known of later steps stays known."""
    one = trainer()
    one.plan = replace(one.plan, window=100)
    one.pump()
    one.batch_read(*batch(1))
    one.batch_read(*batch(2))
    one.lost(loss_of(2, 0))
    one.lost(loss_of(2, 0, Y))
    assert fed(one.again()) == [(1, 0, 1), (1, 1, 1), (2, 0, 0), (2, 1, 0)]
    assert fed(one.again()) == [(1, 0, 2), (1, 1, 2), (2, 0, 0), (2, 1, 0)]


def test_losses_and_reports_of_another_attempt_count_for_nothing() -> None:
    """They are of work that is forgotten; the same ones twice count once."""
    one = trainer()
    one.pump()
    one.batch_read(*batch(1))
    one.lost(loss_of(1, 0))
    one.reported(report(A, 1, {"x": 1.0}), 1.0)
    one.again()
    news = one.news
    assert one.lost(loss_of(1, 0)) == one.reported(report(A, 1, {"x": 1.0}), 1.0) == one.reported(report(B, 1, {"y": 1.0}), 1.0) == []
    assert one.news == news
    one.lost(loss_of(1, 0, attempt=1))
    assert one.news == news + 1
    one.lost(loss_of(1, 0, attempt=1))
    assert one.news == news + 1
    one.reported(report(A, 1, {"x": 1.0}, attempt=1), 1.0)
    one.reported(report(B, 1, {"y": 1.0}, attempt=1), 1.0)
    assert one.done == 1


def test_the_window_does_not_wait_for_losses_that_are_known() -> None:
    """A later step that is fed again may have been through already; its PNodes say nothing twice."""
    one = trainer()
    one.pump()
    one.batch_read(*batch(1))
    one.batch_read(*batch(2))
    for cost in (X, Y):
        one.lost(loss_of(1, 0, cost))
    for cost in (X, Y):
        one.lost(loss_of(1, 1, cost))
    for cost in (X, Y):
        one.lost(loss_of(2, 0, cost))
    assert fed(one.again()) == [(1, 0, 1), (1, 1, 1), (2, 0, 0), (2, 1, 0)]


def test_nothing_is_under_way_until_its_batch_is_there() -> None:
    """Silence of PNodes that were given nothing means nothing."""
    one = trainer(steps=1)
    one.pump()
    seen = [one.under_way]
    one.batch_read(*batch(1))
    seen.append(one.under_way)
    one.reported(report(A, 1, {"x": 1.0}), 1.0)
    one.reported(report(B, 1, {"y": 1.0}), 1.0)
    assert [*seen, one.under_way] == [False, True, False]


def test_a_decision_says_all_that_another_leader_needs() -> None:
    """Loss, norm, the scale that was used, the state after it, and whether PNodes save."""
    one = trainer(hyper=Hyper(checkpoint_every=1, lr=0.5))
    one.reported(report(A, 1, {"x": 9.0}), 1.0)
    publish = one.reported(report(B, 1, {"y": 16.0}), 1.0)[0]
    assert isinstance(publish, Publish)
    decision = publish.message
    assert isinstance(decision, Decision)
    assert (decision.step, decision.loss, decision.grad_norm, decision.lr, decision.loss_scale, decision.save) == (
        1,
        6.0,
        5.0,
        0.5,
        1.0,
        True,
    )
    assert scaler_of(decision.state) == one.scaler


def test_without_a_number_of_steps_it_saves_by_the_seconds_of_work() -> None:
    """Counted from the last time."""
    one = trainer(hyper=Hyper())
    one.begin(0.0)
    saves = []
    for step in range(1, 8):
        one.reported(report(A, step, {"x": 1.0}), step * 10.0)
        one.reported(report(B, step, {"y": 1.0}), step * 10.0)
        assert one.decision is not None
        saves.append(one.decision.save)
    assert saves == [False, False, True, False, False, True, False]


def test_a_decision_of_an_earlier_trainer_is_gone_on_from() -> None:
    """It is sent again and its row told; the next step has the attempt that nobody heard of; nothing before it is read."""
    one = trainer()
    commands = one.take_over(last(5), 3, 1.0)
    assert commands[0] == Publish("dcnr.net.n.step", last(5))
    assert [(row.step, row.loss, row.grad_norm, row.loss_scale, row.epoch) for row in metrics(commands)] == [(5, 2.5, 0.5, 8.0, 1)]
    assert [c.step for c in commands if isinstance(c, ReadBatch)] == [6, 7, 8]
    assert (one.done, one.scaler.loss_scale) == (5, 8.0)
    assert fed(one.batch_read(*batch(6))) == [(6, 0, 3), (6, 1, 3)]
    assert one.reported(report(A, 5, {}), 1.0) == [Publish("dcnr.net.n.step", last(5))]


def test_a_decision_that_arrives_late_is_taken_over_once() -> None:
    """An earlier leader's, which only a PNode had heard of; it is news only if it is of the next step."""
    one = trainer()
    one.pump()
    one.batch_read(*batch(1))
    assert [row.step for row in metrics(one.take(last(1), 1.0))] == [1]
    assert (one.done, one.take(last(1), 1.0), one.take(last(3), 1.0)) == (1, [], [])


def test_a_pnode_that_decides_is_asked_for_what_nobody_took_note_of() -> None:
    """Three steps may have been in flight: they are fed again; the PNode may have been fed three more."""
    one = trainer(decides=True)
    commands = one.take_over(last(9), 2, 1.0)
    assert (one.done, [c.step for c in commands if isinstance(c, ReadBatch)]) == (6, [7, 8, 9, 10])
    one.stop()
    assert one.limit == 12
    early = trainer(decides=True)
    early.take_over(last(2), 1, 1.0)
    assert early.done == 0


def test_stop_after_a_change_of_trainer_ends_at_the_last_decided_step() -> None:
    """What the old one had begun is begun by nobody else."""
    one = trainer()
    one.take_over(last(5), 1, 1.0)
    one.stop()
    assert one.idle


def test_mfu_is_the_share_of_the_peak_at_the_speed_of_the_step() -> None:
    """Two steps of 4 × 3 tokens, in 0.5 and 0.25 s; None where the peak is not known."""
    for share, expected in ((0.01, [0.24, 0.48]), (None, [None, None])):
        one = trainer(decides=True)
        one.plan = replace(one.plan, peak_share=share)
        found = []
        for step, now in ((1, 0.5), (2, 0.75)):
            one.batch_read(*batch(step))
            done = StepDone(A, SESSION, Epoch(1), step, 1.0, 1.0, False, 0.1, 1.0, scaler_fields(ScalerState()))
            found += metrics(one.decided(done, now))
        assert [row.mfu for row in found] == expected
