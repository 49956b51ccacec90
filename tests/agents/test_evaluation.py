"""Validation on a PNode: the machine by itself, and inside a hosted session, which trains as if there were none."""

from __future__ import annotations

import numpy as np
import pytest

from dcnr.agents.commands import Apply, Evaluate, Fold, Pass, SendHop
from dcnr.agents.evaluation import Evaluation, Validated
from dcnr.agents.events import Evaluated, Handoff
from dcnr.agents.plan import make_plan
from dcnr.agents.routing import Local
from dcnr.agents.vnode import Offer
from dcnr.bus.messages import TRAINER, EvalLoss
from dcnr.errors import InvariantError
from dcnr.ids import NodeId
from tests.agents.bench import Bench, messages, only_on_b, through
from tests.agents.tiny import DIM, SEQ, SESSION, A, B, deploy_of

TENSOR = np.zeros((2, 3), np.float32)


def of(micro: int, step: int = 2, attempt: int = 0) -> Validated:
    """A micro-batch of the validation after step 2."""
    return Validated(step, attempt, micro)


def evaluation() -> Evaluation:
    """On `a`, around a segment of `b`: two segments here, of which the second takes two tensors and the targets."""
    routes = make_plan(deploy_of(only_on_b("up", "gelu")), A).routes
    assert [len(segment.inputs) for segment in routes.segments] == [1, 3]
    return Evaluation(routes.segments)


def segments() -> list[int]:
    """Their numbers."""
    return [segment.index for segment in make_plan(deploy_of(only_on_b("up", "gelu")), A).routes.segments]


def offer(one: Evaluation, micro: int, segment: int, index: int, attempt: int = 0) -> Offer:
    """A tensor comes."""
    assert one.takes(of(micro, attempt=attempt), 2)
    result = one.offer(of(micro, attempt=attempt), Local(segments()[segment], index), TENSOR, 0.5 if index == 2 else 0.0)
    one.validate()
    return result


def test_a_pass_may_run_when_everything_for_it_is_here() -> None:
    """The lowest micro-batch first; each once, with its weights in the order of the inputs."""
    one = evaluation()
    assert not one.ready(2)
    assert [offer(one, 1, 1, index) for index in (2, 0)] == [Offer.TAKEN] * 2
    assert not one.ready(2)
    offer(one, 1, 1, 1)
    offer(one, 0, 1, 2)
    offer(one, 3, 0, 0)
    first = one.take()
    assert (first.of, first.segment, first.weights) == (of(1), segments()[1], (0.0, 0.0, 0.5))
    assert one.take().of == of(3)
    assert not one.ready(2)
    assert offer(one, 1, 1, 0) is offer(one, 0, 1, 2) is Offer.DUPLICATE


def test_only_the_step_that_was_decided_last_is_validated() -> None:
    """What comes before the decision waits for it; what comes after the next one is stale."""
    one = evaluation()
    assert one.takes(of(0), 1)
    one.offer(of(0), Local(segments()[0], 0), TENSOR, 0.0)
    assert (one.ready(1), one.ready(2)) == (False, True)
    one.decide(2)
    assert one.ready(2)
    one.decide(3)
    assert not one.ready(2)
    assert not one.takes(of(0), 3)


def test_a_newer_attempt_begins_anew_and_an_older_one_is_stale() -> None:
    """Nothing of the one before is given out any more."""
    one = evaluation()
    offer(one, 0, 0, 0)
    assert one.takes(of(1, attempt=2), 2)
    assert (one.attempt, one.ready(2), one.takes(of(0, attempt=1), 2)) == (2, False, False)
    assert offer(one, 0, 0, 0, attempt=2) is Offer.TAKEN


def test_one_that_contradicts_itself_is_found() -> None:
    """Nothing is ready that is not here."""
    one = evaluation()
    one._ready.add((0, segments()[0]))
    with pytest.raises(InvariantError):
        one.validate()


def validating(bench: Bench, micro: int, step: int, rows: int = 3, attempt: int = 0) -> None:
    """What `up` takes arrives for a validation."""
    bench.hop("eval", ("residual", 0), (("up", 0),), (step, micro), rows, attempt=attempt)


def test_a_hosted_session_evaluates_between_two_steps() -> None:
    """Hops may come before the decision; passes run behind `Apply`; outputs go on as hops of the validation; training is as ever."""
    bench = Bench(deploy_of(only_on_b("up", "gelu")), B)
    through(bench, 1)
    validating(bench, 0, 1)
    (fold,) = bench.jobs
    assert isinstance(fold, Fold)
    bench.folded(1)
    assert bench.jobs == []
    bench.decide(1)
    apply, evaluate = bench.jobs
    assert isinstance(apply, Apply)
    assert isinstance(evaluate, Evaluate)
    assert (evaluate.step, evaluate.micro, evaluate.attempt) == (1, 0, 0)
    wide = np.zeros((3, SEQ, 2 * DIM), np.float32)
    done = Evaluated(SESSION, bench.session.deploy.epoch, evaluate.segment, 1, 0, 0, (Handoff(wide, wide),), ())
    (sent,) = bench.session.evaluated(done)
    assert isinstance(sent, SendHop)
    assert (sent.hop.phase, sent.hop.step, sent.hop.micro, sent.hop.targets) == ("eval", 1, 0, (("down", 0),))
    validating(bench, 1, 1, attempt=1)
    assert bench.session.hosted(False).attempt == 1
    assert bench.session.hosted(False).busy
    assert bench.session.evaluated(done) == []
    bench.session.validate()
    bench.hop("fwd", ("residual", 0), (("up", 0),), (2, 0))
    assert [type(job) for job in bench.jobs] == [Pass, Evaluate]


def test_what_is_wrong_with_a_hop_is_counted() -> None:
    """Unknown, malformed, stale and repeated ones; fewer rows are right, more or none are not."""
    bench = Bench(deploy_of(only_on_b("up", "gelu"), step=1), B)
    bench.hop("eval", ("residual", 0), (("nobody", 0),), (1, 0))
    for step in (0, 1, 1):
        validating(bench, 0, step)
    for micro, rows in ((1, 0), (2, 2), (3, 4)):
        validating(bench, micro, 1, rows)
    assert dict(bench.telemetry.dropped) == {"unknown": 1, "stale": 1, "duplicate": 1, "malformed": 2}


def test_the_costs_of_a_validation_are_reported() -> None:
    """By the PNode that has them, which decides alone here: nothing else of it is told, and no step is done."""
    bench = Bench(deploy_of(dict.fromkeys(only_on_b(), A), step=3), A)
    for phase_source, target, weight in (((TRAINER, 0), ("embedder", 0), 0.0), ((TRAINER, 1), ("loss", 1), 0.5)):
        bench.hop("eval", phase_source, (target,), (3, 0), weight=weight)
    (evaluate,) = bench.jobs
    assert isinstance(evaluate, Evaluate)
    assert evaluate.weights == (0.0, 0.5)
    done = Evaluated(SESSION, bench.session.deploy.epoch, evaluate.segment, 3, 0, 0, (), ((NodeId("loss"), 1.5),))
    told = messages(bench.session.evaluated(done))
    assert told == [EvalLoss(A, SESSION, bench.session.deploy.epoch, 3, NodeId("loss"), 0, 1.5)]
    assert bench.session.step == 3
