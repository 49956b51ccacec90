"""Validation: the machine by itself, and sessions that are validated while things go wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from dcnr.bus.messages import EvalLoss, Save, SaveFailed, ValidationMetrics
from dcnr.errors import InvariantError
from dcnr.ids import NodeId, PNodeId
from dcnr.orchestrator.commands import Command, Measured, Publish, ReadWindows, SendHop
from dcnr.orchestrator.events import (
    BatchFailed,
    BatchRead,
    Lost,
    ManifestFailed,
    ManifestWritten,
    Offered,
    SessionEvent,
    StartSession,
    WindowsRead,
)
from dcnr.orchestrator.layout import plan_of
from dcnr.orchestrator.state import SessionRecord, ValidationRecord
from dcnr.orchestrator.validation import Run, Validation, complete, mean_loss, perplexity
from tests.orchestrator.fakes import BEST, SESSION, eval_loss, graph, info, record
from tests.orchestrator.stage import Stage
from tests.orchestrator.story import FIRST, ONE, START, SUSPEND, THREE, TWO, WINDOWS, A, B, PNodes, S, Story, trained, windows

LOSS = NodeId("loss")
EVERY = {"validate_every": 2, "checkpoint_every": 0}


def machine(known: ValidationRecord | None = None, upto: int = 0, steps: int = 10, **hyper: int) -> Validation:
    """Of the small network on a and b; two rows a micro-batch, so four of them for the split."""
    at = replace(record(steps, **(EVERY | hyper)), epoch=FIRST)
    homes = {node.id: A if index == 0 else B for index, node in enumerate(graph().nodes)}
    return Validation(plan_of(at, graph(), homes, PNodeId("t")), known, upto)


def read(one: Validation, commands: list[Command]) -> list[SendHop]:
    """Everything that is asked for is read; the hops that come of it."""
    hops: list[SendHop] = []
    for command in commands:
        if isinstance(command, ReadWindows):
            hops += read(one, one.read(windows(command)))
        elif isinstance(command, SendHop):
            hops.append(command)
    one.validate()
    return hops


def answer(hop: SendHop, loss: float | None = None) -> EvalLoss:
    """The cost's PNode has the targets of a micro-batch."""
    value = eval_loss(hop.hop, hop.payload) if loss is None else loss
    return EvalLoss(hop.to, SESSION, FIRST, hop.hop.step, LOSS, hop.hop.micro, value)


def targets(hops: list[SendHop]) -> list[SendHop]:
    """Those that a cost answers."""
    return [hop for hop in hops if hop.hop.source_slot == 1]


def finish(one: Validation, hops: list[SendHop]) -> ValidationMetrics:
    """Answer everything, the last first."""
    while hops:
        last = hops.pop()
        hops += targets(read(one, one.heard(answer(last))))
    assert one.last is not None
    return one.last


def validations(story: Story) -> dict[int, float]:
    """Loss by step, as it was told last."""
    return {row.step: row.loss for row in story.measured(ValidationMetrics)}


def test_it_feeds_the_split_in_order_and_no_more_than_the_window() -> None:
    """Hops are of phase eval, of the step that is validated; ids of nothing are 0, their targets are -1."""
    one = machine(validate_batches=0)
    hops = read(one, one.begin(2))
    assert {(hop.hop.phase, hop.hop.step, hop.hop.attempt) for hop in hops} == {("eval", 2, 0)}
    assert [hop.hop.micro for hop in targets(hops)] == [0, 1, 2, 3]
    assert one.waits
    ids, last = hops[-2], hops[-1]
    assert (ids.payload.shape, ids.payload.min(), last.payload.min(), last.hop.weight) == ((1, 4), 0, -1, 0.5)
    narrow = machine()
    narrow._window = 1
    assert len(targets(read(narrow, narrow.begin(2)))) == 1


def test_the_loss_is_the_mean_over_all_targets_in_whatever_order_answers_come() -> None:
    """Micro-batches count by their targets; the same answer twice, or of another step, or of one that was not fed, counts for nothing."""
    one = machine()
    hops = targets(read(one, one.begin(2)))
    for hop, loss in zip(reversed(hops), (8.0, 3.0, 2.0, 1.0), strict=True):
        assert one.heard(replace(answer(hop, 99.0), step=1)) == one.heard(replace(answer(hop, 99.0), micro=7)) == []
        assert one.heard(replace(answer(hop), cost=NodeId("head"))) == []
        told = one.heard(answer(hop, loss))
        assert one.heard(answer(hop, 99.0)) == []
    tokens = WINDOWS * 4 - 2
    assert one.last == ValidationMetrics(
        SESSION, 2, (1 * 8 + 2 * 8 + 3 * 8 + 8 * 2) / tokens, math.exp(64 / tokens), 64 / tokens / math.log(2) / 4, tokens, True, FIRST
    )
    assert told == [Measured(one.last)]
    assert not one.under_way


def test_what_is_in_flight_is_fed_again_as_the_next_attempt() -> None:
    """Answers of the attempt before count; only the rest is fed again, and the loss is the same."""
    undisturbed, one = machine(), machine()
    expected = finish(undisturbed, targets(read(undisturbed, undisturbed.begin(2))))
    first, second, *_ = targets(read(one, one.begin(2)))
    one.heard(answer(second))
    again = targets(read(one, one.again()))
    assert [(hop.hop.micro, hop.hop.attempt) for hop in again] == [(0, 1), (2, 1), (3, 1)]
    one.heard(answer(first))
    assert finish(one, again[1:]) == expected
    assert one.again() == []


def test_a_leader_that_takes_over_feeds_with_an_attempt_that_nobody_has_heard_of() -> None:
    """An earlier one may have fed this validation too; what is in flight is fed again as the next after it."""
    one = machine()
    one.first_attempt = 5
    assert {hop.hop.attempt for hop in read(one, one.begin(2))} == {5}
    assert {hop.hop.attempt for hop in read(one, one.again())} == {6}


def test_a_number_of_batches_is_the_start_of_the_split() -> None:
    """One batch is two micro-batches; more than there is, is all of it."""
    some, many = machine(validate_batches=1), machine(validate_batches=99)
    assert finish(some, targets(read(some, some.begin(2)))).tokens == 4 * 4
    assert finish(many, targets(read(many, many.begin(2)))).tokens == WINDOWS * 4 - 2


def test_what_was_given_up_or_comes_late_changes_nothing() -> None:
    """Reads and answers of it are of no use any more; one that comes twice neither."""
    one = machine()
    hops = targets(read(one, one.begin(2)))
    ask = ReadWindows(SESSION, FIRST, "text", 2, 0, 2, 4)
    assert one.read(windows(ask)) == []
    one.cancel()
    assert (one.under_way, one.waits, one.heard(answer(hops[0])), one.read(windows(ask))) == (False, False, [], [])


def test_the_best_is_the_first_with_the_smallest_loss_and_patience_counts_by_steps() -> None:
    """What is validated again is counted once; where somebody resumed, patience begins anew; numbers that are none are never best."""
    one = machine(ValidationRecord(6, 4, 2.0), 6, patience=3)
    assert one.early_end is None
    assert one.hold == 8
    hops = targets(read(one, one.begin(8)))
    for hop in hops:
        one.heard(answer(hop, 2.0))
    assert one.known == ValidationRecord(8, 4, 2.0)
    assert one.early_end is None
    tired = machine(ValidationRecord(10, 4, 2.0), 10, patience=3)
    assert tired.early_end == "ended early, after step 10: 3 validations without a smaller loss than that of step 4, which is 2.0000"
    assert machine(ValidationRecord(10, 4, 2.0, counted_from=8), 10, patience=3).early_end is None
    nan = machine(ValidationRecord(2, 2, math.nan), 2)
    for hop in targets(read(nan, nan.begin(4))):
        nan.heard(answer(hop, 5.0))
    assert nan.known == ValidationRecord(4, 4, 5.0)
    for hop in targets(read(nan, nan.begin(6))):
        nan.heard(answer(hop, math.nan))
    assert nan.known == ValidationRecord(6, 4, 5.0)


def test_costs_are_added_in_their_order() -> None:
    """Each is the mean over all targets."""
    run = Run(2, micros=2, losses={(LOSS, 0): 1.0, (LOSS, 1): 3.0, (A_COST, 0): 10.0, (A_COST, 1): 10.0}, counted={0: 3, 1: 1})
    assert mean_loss(run, (LOSS, A_COST)) == 6 / 4 + 10
    assert perplexity(1e6) == math.inf


A_COST = NodeId("aux")


def test_a_session_is_complete_when_its_last_step_is_validated_too() -> None:
    """If it is to be."""
    at_end = replace(record(steps=5), step=5)
    assert complete(at_end)
    owed = replace(at_end, hyper={"validate_every": 2})
    assert not complete(owed)
    assert complete(replace(owed, validation=ValidationRecord(5, 4, 1.0)))


def test_a_machine_that_contradicts_itself_is_found() -> None:
    """What is in flight was read."""
    one = machine()
    one.begin(2)
    assert one._run is not None
    one._run.in_flight.add(3)
    with pytest.raises(InvariantError):
        one.validate()


@pytest.mark.parametrize("pnodes", [ONE, TWO, THREE], ids=len)
def test_a_session_is_validated_and_trains_as_if_it_were_not(pnodes: PNodes) -> None:
    """Every second step and the last one; nothing of the next step is fed before; the best checkpoint stays, whatever `keep_last` says."""
    plain = trained(pnodes, steps=7, checkpoint_every=0)
    story = trained(pnodes, steps=7, keep_last=1, **EVERY)
    assert story.state is S.DONE
    assert story.rows == plain.rows
    assert list(validations(story)) == [2, 4, 6, 7]
    assert story.kept == [BEST, 7]
    known = story.session.record.validation
    assert known == ValidationRecord(7, BEST, validations(story)[BEST])
    order = [hop.step for hop in story.pnodes.hops if hop.phase == "fwd" or hop.micro == 0]
    assert order == sorted(order)


def test_patience_ends_a_session_in_words_and_whoever_resumes_it_has_new_patience() -> None:
    """It is done, at a checkpoint of where it ended, and every PNode lets go."""
    story = trained(TWO, steps=30, patience=2, **EVERY)
    reason = "ended early, after step 8: 2 validations without a smaller loss than that of step 4, which is 4.6154"
    assert (story.state, story.session.record.reason, story.kept[-1]) == (S.DONE, reason, 8)
    assert story.pnodes.hosted == {}
    story.tell(StartSession(3, SESSION, graph(), story.session.record.newest), Offered(TWO))
    assert (story.state, story.kept[-1]) == (S.DONE, 12)
    assert validations(story).keys() == {2, 4, 6, 8, 10, 12}


@pytest.mark.parametrize("pnodes", [ONE, TWO], ids=len)
def test_a_lost_answer_is_made_good(pnodes: PNodes) -> None:
    """What is in flight is fed again, as often as it takes, and the numbers are the same."""
    undisturbed = trained(pnodes, steps=6, **EVERY)
    story = Story(record(steps=6, **EVERY))
    losing = iter([True, False, True] * 4)
    story.lose = lambda event: isinstance(event, EvalLoss) and next(losing, False)
    story.tell(START, Offered(pnodes))
    story.wait(60.0)
    assert story.state is S.DONE
    assert any(hop.attempt for hop in story.pnodes.hops)
    assert (story.rows, validations(story)) == (undisturbed.rows, validations(undisturbed))


def test_a_suspended_session_is_validated_when_it_goes_on() -> None:
    """Who suspends does not wait for a validation."""
    story = Story(record(steps=6, **EVERY))
    story.lose = lambda event: isinstance(event, EvalLoss)
    story.tell(START, Offered(TWO))
    assert (story.state, story.session.step) == (S.RUNNING, 2)
    story.tell(SUSPEND)
    assert (story.state, story.kept, validations(story)) == (S.SUSPENDED, [0, 2], {})
    story.lose = lambda _event: False
    story.tell(StartSession(3, SESSION, graph(), story.session.record.newest), Offered(TWO))
    assert (story.state, list(validations(story))) == (S.DONE, [2, 4, 6])


@pytest.mark.parametrize("at", range(1, 8))
def test_a_run_that_is_suspended_now_and_then_ends_where_an_undisturbed_one_does(at: int) -> None:
    """Only one that had ended has new patience."""
    story = Story(record(steps=30, patience=2, **EVERY))
    story.lose = lambda event: isinstance(event, BatchRead) and event.step > at
    story.tell(START, Offered(TWO))
    story.tell(SUSPEND)
    assert (story.state, story.session.record.step) == (S.SUSPENDED, at)
    story.lose = lambda _event: False
    story.tell(StartSession(3, SESSION, graph(), story.session.record.newest), Offered(TWO))
    assert (story.state, story.kept[-1], list(validations(story))) == (S.DONE, 8, [2, 4, 6, 8])


def test_a_session_at_its_last_step_goes_on_if_that_is_not_validated_yet() -> None:
    """Its PNode went while that was under way, and who suspends does not wait. Then nothing is left to do, whatever is asked for."""
    story = Story(record(steps=2, validate_every=2, checkpoint_every=2))
    story.lose = lambda event: isinstance(event, EvalLoss)
    story.tell(START, Offered(ONE))
    story.tell(SUSPEND, Lost(A, "killed"))
    assert (story.state, story.session.record.step, validations(story)) == (S.SUSPENDED, 2, {})
    story.lose = lambda _event: False
    again = StartSession(3, SESSION, graph(), story.session.record.newest)
    assert story.session.objection(replace(again, steps=1)) == "session 's' has done step 2 of 1; ask for more steps"
    assert story.session.objection(again) is None
    story.tell(again, Offered((info("b"),)))
    assert (story.state, list(validations(story)), story.kept) == (S.DONE, [2], [0, 2])
    assert story.session.record.kept == 2
    assert story.session.objection(again) == "session 's' has done step 2 of 2; ask for more steps"


def test_a_session_says_that_it_validates() -> None:
    """No step is done meanwhile, so whoever asks why is told."""
    story = Story(record(steps=6, **EVERY))
    story.lose = lambda event: isinstance(event, EvalLoss)
    story.tell(START, Offered(TWO))
    assert (story.state, story.session.reason) == (S.RUNNING, "validates step 2")
    story.lose = lambda event: isinstance(event, BatchRead) and event.step > 3
    story.wait(5.0)
    assert (story.session.step, story.session.reason) == (3, "")


def test_the_last_validation_is_waited_for_by_who_suspends() -> None:
    """There is nothing to go on with."""
    story = Story(record(steps=2, **EVERY))
    story.lose = lambda event: isinstance(event, EvalLoss)
    story.tell(START, Offered(TWO))
    story.tell(SUSPEND)
    assert story.state is S.SUSPENDING
    story.lose = lambda _event: False
    story.wait(10.0)
    assert (story.state, list(validations(story))) == (S.DONE, [2])


def refusing(kind: type[SessionEvent]) -> Callable[[Story], None]:
    """Storage fails for what comes next of step 2."""

    def refuse(story: Story) -> None:
        if kind is ManifestFailed:
            story.tell(ManifestFailed(SESSION, FIRST, 2, "disk full"))
        else:
            story.tell(SaveFailed(A, SESSION, FIRST, 2, "disk full"))

    return refuse


@pytest.mark.parametrize("kind", [ManifestFailed, SaveFailed], ids=lambda kind: kind.__name__)
def test_training_waits_for_the_best_checkpoint_unless_storage_refuses_it(kind: type[SessionEvent]) -> None:
    """`Save` is repeated until it is there; a full disk stops no training, and is told."""
    story = Story(record(steps=6, **EVERY))
    story.drop = lambda command: isinstance(command, Publish) and command.message == Save(SESSION, FIRST, 2)
    story.lose = lambda event: isinstance(event, ManifestWritten) and event.checkpoint.step == 2
    story.tell(START, Offered(TWO))
    assert (story.session.step, list(validations(story))) == (2, [2])
    before = len(story.sent(Save))
    story.wait(5.0)
    assert len(story.sent(Save)) > before
    assert "waits for checkpoint 2 of" in story.session.reason
    refusing(kind)(story)
    assert (story.state, list(validations(story))) == (S.DONE, [2, 4, 6])


def test_a_split_that_cannot_be_read_fails_the_session_in_words() -> None:
    """As a batch that cannot be."""
    story = Story(record(steps=6, **EVERY))
    story.lose = lambda event: isinstance(event, WindowsRead)
    story.tell(START, Offered(TWO))
    story.tell(BatchFailed(SESSION, FIRST, 2, "no tokens for validation"))
    assert (story.state, story.session.reason) == (S.FAILED, "no tokens for validation")


@pytest.mark.parametrize("seed", range(3))
def test_losses_deaths_and_new_leaders_change_no_validation(seed: int) -> None:
    """Every second step is validated while a PNode dies, the leader changes and messages are lost."""
    hyper = EVERY | {"checkpoint_every": 3}
    calm = Stage(record(steps=8, **hyper), "ab")
    calm.until(lambda: calm.state is S.DONE)
    stage = Stage(record(steps=8, **hyper), "ab", seed, loss=0.05)
    stage.until(lambda: bool(stage.validations))
    stage.kill("a")
    stage.wait(1.0)
    stage.lead()
    stage.join("a")
    stage.until(lambda: len(stage.validations) > 1)
    stage.lead()
    stage.until(lambda: stage.state is S.DONE)
    losses = {step: row.loss for step, row in sorted(stage.validations.items())}
    assert losses == {step: row.loss for step, row in sorted(calm.validations.items())}, f"seed {seed}"
    assert stage.numbers == calm.numbers
    known: SessionRecord = stage.session.record
    assert known.validation == calm.session.record.validation
    assert BEST in [checkpoint.step for checkpoint in known.checkpoints]


@pytest.mark.parametrize("pnodes", ["a", "ab"])
def test_a_new_leader_goes_on_though_storage_refused_the_best_checkpoint(pnodes: str) -> None:
    """PNodes have gone on: no step is done twice, and nothing is deployed anew."""
    stage = Stage(record(steps=12, **EVERY), pnodes)
    stage.pnodes.unsaved.add(BEST)
    stage.until(lambda: stage.session.step > BEST)
    epoch = stage.session.record.epoch
    stage.lead()
    stage.until(lambda: stage.state is S.DONE)
    assert stage.session.record.epoch == epoch
    assert set(stage.pnodes.times.values()) == {1}


def test_the_old_best_checkpoint_stays_until_there_is_one_of_the_new() -> None:
    """If storage refuses that, the old one is what there is."""
    stage = Stage(record(steps=12, keep_last=1, **EVERY), "ab")
    stage.pnodes.unsaved.add(BEST)
    stage.until(lambda: stage.state is S.DONE)
    shown = stage.session.record
    assert ([checkpoint.step for checkpoint in shown.checkpoints], shown.kept, sorted(stage.storage)) == ([2, 12], 2, [2, 12])
    assert shown.validation is not None
    assert shown.validation.best_step == BEST


@pytest.mark.parametrize("pnodes", ["a", "ab"])
def test_a_best_validation_whose_checkpoint_the_leader_did_not_live_to_see_is_done_again(pnodes: str) -> None:
    """Where everyone still stands at its step: so it is asked for again."""
    stage = Stage(record(steps=12, **EVERY), pnodes)
    stage.until(lambda: BEST in stage.validations)
    assert BEST not in stage.storage
    epoch = stage.session.record.epoch
    stage.lead()
    stage.until(lambda: stage.state is S.DONE)
    assert (stage.session.record.epoch, BEST in stage.storage) == (epoch, True)


@pytest.mark.parametrize("pnodes", ["a", "ab"])
def test_pnodes_that_went_on_after_a_validation_that_nobody_wrote_down_go_back_at_once(pnodes: str) -> None:
    """They cannot validate a step that they have left."""
    stage = Stage(record(steps=12, **EVERY), pnodes)
    stage.until(lambda: stage.session.step == BEST - 1)
    before = stage.session.record
    stage.until(lambda: (PNodeId("a"), BEST + 1) in stage.pnodes.times)
    stage.records[SessionRecord, SESSION] = before
    stage.lead()
    at = stage.now
    stage.until(lambda: stage.session.record.epoch > before.epoch)
    assert stage.now - at < 5.0
    stage.until(lambda: stage.state is S.DONE)
    assert list(stage.validations) == [2, 4, 6, 8, 10, 12]


def test_a_resume_from_before_the_best_knows_no_best() -> None:
    """It may become another run; what was known of it before stays."""
    known = ValidationRecord(8, 4, 1.0)
    assert known.resumed(3, ended=True) is None
    assert known.resumed(6, ended=True) == ValidationRecord(6, 4, 1.0, counted_from=6)
    assert known.resumed(6, ended=False) == ValidationRecord(6, 4, 1.0)
    assert known.back_to(9) == known
