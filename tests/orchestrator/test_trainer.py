"""The steps of one deployment, where a session's story does not reach."""

from __future__ import annotations

from dcnr.bus.messages import Loss, StepDone, StepReport
from dcnr.ids import Epoch, NetworkId, NodeId, PNodeId
from dcnr.optim.decide import ScalerState
from dcnr.optim.hyper import Hyper
from dcnr.orchestrator.commands import Measured, Publish, ReadBatch
from dcnr.orchestrator.feed import Address, Feeds
from dcnr.orchestrator.trainer import HOPELESS_STEPS, Plan, Trainer, scaler_fields, scaler_of, step_loss
from tests.orchestrator.fakes import SESSION

X, Y = NodeId("x"), NodeId("y")
A, B = PNodeId("a"), PNodeId("b")


def trainer(decides: bool = False, steps: int = 100) -> Trainer:
    """Two costs on two PNodes (or one), two micro-batches."""
    homes = {X: A, Y: A if decides else B}
    address = Address(NetworkId("n"), SESSION, Epoch(1), PNodeId("t"), homes)
    feeds = Feeds(((X, 0),), ((X, 1), (Y, 1)), 3)
    plan = Plan(address, feeds, (X, Y), (X, Y), Hyper(), "text", 0, steps, 4, 2, 3, decides)
    return Trainer(plan, 0, ScalerState(), 0.0)


def report(pnode: PNodeId, step: int, norms: dict[str, float], finite: bool = True) -> StepReport:
    """A PNode's report, with the losses of the cost that it holds."""
    cost = X if pnode == A else Y
    return StepReport(pnode, SESSION, Epoch(1), step, 0, norms, finite, ((cost, 1, 2.0), (cost, 0, 1.0)))


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


def test_a_lost_step_done_is_covered_by_the_next() -> None:
    """Step 2 done means that step 1 was."""
    one = trainer(decides=True)
    commands = one.decided(done(2), 1.0)
    assert isinstance(commands[0], Measured)
    assert commands[0].metric.step_ms == 500.0  # type: ignore[union-attr]
    assert one.done == 2
    assert one.decided(done(1), 2.0) == []


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
