"""The compute thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace

import numpy as np
import pytest

from dcnr.agents.commands import Abort, Apply, Fold, Job, Pass, Settle, Snapshot
from dcnr.agents.events import Aborted, Applied, Folded, Handoff, JobEvent, JobFailed, PassDone, Settled, SnapshotTaken
from dcnr.agents.plan import make_plan
from dcnr.agents.runner import Runner, describe, is_world, trace_of
from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.bus.messages import Decision
from dcnr.errors import BackendUnavailable, InvariantError, WorldError
from dcnr.ids import Epoch
from dcnr.optim.decide import ScalerState
from tests.agents.bench import only_on_b
from tests.agents.tiny import SEQ, SESSION, VOCABULARY, A, alone, deploy_of

DEPLOY, PLAN = alone()
EPOCH = DEPLOY.epoch


class Answers:
    """A runner of two threads, and the events it gives."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[JobEvent] = queue.SimpleQueue()
        self.runner = Runner(NumpyBackend(), self.events.put, threads=2)

    def next(self) -> JobEvent:
        """Wait for one."""
        return self.events.get(timeout=20)


@pytest.fixture
def answers() -> Iterator[Answers]:
    """Closed at the end, in time."""
    made = Answers()
    yield made
    assert made.runner.close(10)


def job(step: int = 1, micro: int = 0, rows: int = 3) -> Pass:
    """A micro-batch forward and backward."""
    ids = np.random.default_rng(step).integers(0, VOCABULARY, (rows, SEQ + 1))
    return Pass(SESSION, EPOCH, 0, step, micro, (ids[:, :-1], ids[:, 1:]), (0.0, 0.03), ())


def test_jobs_are_answered_in_order(answers: Answers) -> None:
    """Everything of two steps is queued at once, and answered one by one."""
    answers.runner.load(DEPLOY, PLAN, None)
    for queued in (job(1, 0), job(1, 1), Settle(SESSION, EPOCH, 1), Snapshot(SESSION, EPOCH, 1), job(2, 0)):
        answers.runner.submit(queued)
    first = answers.next()
    assert isinstance(first, PassDone)
    assert (first.step, first.micro, first.outputs, first.gradients) == (1, 0, (), ())
    assert first.losses == ()
    assert isinstance(answers.next(), PassDone)
    settled, taken = answers.next(), answers.next()
    assert isinstance(settled, Settled)
    assert (settled.step, settled.verdict.state.updates, settled.loss_scale) == (1, 1, 1.0)
    assert [(cost, micro) for cost, micro, _ in settled.losses] == [("loss", 0), ("loss", 1)]
    assert isinstance(taken, SnapshotTaken)
    assert taken.state == settled.verdict.state
    assert "embedder.weight:m" in taken.tensors
    last = answers.next()
    assert isinstance(last, PassDone)
    assert last.step == 2


def test_folding_and_applying_are_separate_where_others_decide(answers: Answers) -> None:
    """Norms go out, a decision comes in."""
    answers.runner.load(DEPLOY, PLAN, None)
    decision = Decision(SESSION, EPOCH, 1, False, 0.1, 1.0, 1.0, 2.0, 1.0, 1.0, asdict(ScalerState(updates=1)))
    for queued in (job(1, 0), job(1, 1), Fold(SESSION, EPOCH, 1, 2), Apply(SESSION, EPOCH, decision)):
        answers.runner.submit(queued)
    answers.next()
    answers.next()
    folded = answers.next()
    assert isinstance(folded, Folded)
    assert folded.finite
    assert folded.attempt == 2
    assert list(folded.squared_norms) == [node.id for node in PLAN.graph.nodes if PLAN.nodes[node.id].parameters]
    assert answers.next() == Applied(SESSION, EPOCH, 1)


def test_tensors_for_others_are_in_host_memory(answers: Answers) -> None:
    """An output that goes over the wire has all rows, and a copy for the host; one that stays has none."""
    deploy = deploy_of(only_on_b("up"))
    answers.runner.load(deploy, make_plan(deploy, A), None)
    ids = np.zeros((3, SEQ), np.int64)
    answers.runner.submit(Pass(SESSION, EPOCH, 0, 1, 0, (ids,), (0.0,), None))
    done = answers.next()
    assert isinstance(done, PassDone)
    (handoff,) = done.outputs
    assert isinstance(handoff, Handoff)
    assert handoff.array.shape == (3, SEQ, 8)
    assert handoff.host is not None


def test_a_step_that_is_forgotten_leaves_no_trace(answers: Answers) -> None:
    """The same losses and norms as if it had been begun but once; answers carry the attempt."""
    answers.runner.load(DEPLOY, PLAN, None)
    for queued in (job(1, 0), job(1, 1), Settle(SESSION, EPOCH, 1)):
        answers.runner.submit(queued)
    *_, calm = [answers.next() for _ in range(3)]
    assert isinstance(calm, Settled)
    again = replace(DEPLOY, epoch=Epoch(2))
    answers.runner.load(again, PLAN, None)
    attempts = [replace(job(1, micro), epoch=again.epoch, attempt=attempt) for attempt, micro in ((0, 0), (1, 0), (1, 1))]
    everything: list[Job] = [attempts[0], Abort(SESSION, again.epoch, 1), *attempts[1:], Settle(SESSION, again.epoch, 1)]
    for one in everything:
        answers.runner.submit(one)
    events = [answers.next() for _ in range(5)]
    assert events[1] == Aborted(SESSION, again.epoch, 1)
    assert [event.attempt for event in events if isinstance(event, PassDone)] == [0, 1, 1]
    assert events[4] == replace(calm, epoch=again.epoch)


def test_a_failure_of_the_machine_is_told_from_one_of_the_network(answers: Answers) -> None:
    """A device that is lost may be found elsewhere; ids beyond the vocabulary may not."""
    for error, world in (
        (BackendUnavailable("the GPU fell off the bus"), True), (MemoryError(), True), (OSError(), True), (WorldError(""), True),
        (ValueError(), False), (InvariantError(""), False),
    ):  # fmt: skip
        assert is_world(error) == world
    answers.runner.load(DEPLOY, PLAN, None)
    answers.runner.submit(replace(job(), inputs=(np.full((3, SEQ), 10**6), np.zeros((3, SEQ), np.int64))))
    failed = answers.next()
    assert isinstance(failed, JobFailed)
    assert not failed.world


def test_an_exception_in_a_node_names_it_and_the_thread_goes_on(answers: Answers) -> None:
    """Ids beyond the vocabulary fail in the embedder; the next job is done."""
    answers.runner.load(DEPLOY, PLAN, None)
    bad = replace(job(), inputs=(np.full((3, SEQ), 10**6), np.zeros((3, SEQ), np.int64)))
    answers.runner.submit(bad)
    failed = answers.next()
    assert isinstance(failed, JobFailed)
    assert failed.message.startswith("node 'embedder': IndexError")
    assert "Traceback" in failed.traceback
    assert "node 'embedder'" in failed.traceback
    answers.runner.submit(job())
    assert isinstance(answers.next(), PassDone)


def test_a_dropped_session_is_gone(answers: Answers) -> None:
    """Jobs of a session without arrays fail."""
    answers.runner.load(DEPLOY, PLAN, None)
    answers.runner.drop(SESSION, EPOCH).result(20)
    answers.runner.submit(job())
    assert isinstance(answers.next(), JobFailed)


def test_a_failed_load_is_the_callers(answers: Answers) -> None:
    """A checkpoint without a tensor raises where it was asked for."""
    with pytest.raises(KeyError, match="embedder"):
        answers.runner.load(DEPLOY, PLAN, {}).result(20)


def test_closing_gives_up_what_is_queued() -> None:
    """Closing waits for the job at work only so long, and answers nothing afterwards."""
    began, go_on, answered = threading.Event(), threading.Event(), list[JobEvent]()

    class Slow(NumpyBackend):
        """Its embedder waits."""

        def embedding(self, *arguments: object) -> np.ndarray:
            began.set()
            assert go_on.wait(20)
            return super().embedding(*arguments)  # type: ignore[arg-type]  # passed on as they came

    runner = Runner(Slow(), answered.append, threads=1)
    runner.load(DEPLOY, PLAN, None)
    runner.submit(job())
    runner.submit(job(1, 1))
    assert began.wait(20)
    assert not runner.close(0.01)
    go_on.set()
    assert runner.close(20)
    assert answered == []


def test_errors_are_described_in_one_line() -> None:
    """Notes, kind and message; the traceback apart."""
    error = ValueError("too\nlong")
    error.add_note("node 'x'")
    assert describe(error) == "node 'x': ValueError: too long"
    assert trace_of(error).splitlines()[:2] == ["ValueError: too", "long"]
