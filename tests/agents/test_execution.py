"""Row shards, the end of a step, and the same bits however many threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from dcnr.agents.commands import Evaluate, Pass
from dcnr.agents.crew import Crew
from dcnr.agents.execution import Execution
from dcnr.agents.plan import make_plan
from dcnr.backends.base import Backend, HostArray
from dcnr.backends.cupy.backend import CupyBackend
from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.ids import Epoch
from dcnr.optim.decide import ScalerState, decide
from dcnr.optim.hyper import Hyper
from dcnr.optim.update import StepNumbers
from tests.agents.bench import only_on_b
from tests.agents.tiny import SEQ, SESSION, TINY, VOCABULARY, A, alone, deploy_of
from tests.backends.cupy.emulator.device import EmulatedDevice

BATCH = 6
EPOCH = Epoch(1)
"""Of every deploy here."""


class WholeBackend(NumpyBackend):
    """As a GPU: no shards."""

    runs_shards = False


def emulated() -> CupyBackend:
    """A GPU that records passes, and does again what it did when it recorded them."""
    return CupyBackend(EmulatedDevice(90))


def make(backend: Backend | None = None, threads: int = 1, **options: object) -> Execution:
    """The tiny network on one PNode, loaded from the seed."""
    deploy, plan = alone(**options)
    execution = Execution(backend or NumpyBackend(), Crew(threads), deploy, plan)
    execution.load(None)
    return execution


def tokens(step: int) -> HostArray:
    """Ids [B, T + 1]."""
    return np.random.default_rng(step).integers(0, VOCABULARY, (BATCH, SEQ + 1))


def jobs(step: int, micro_batches: int) -> list[Pass]:
    """The passes of a step: forward and backward at once."""
    rows = BATCH // micro_batches
    parts = [tokens(step)[micro * rows : (micro + 1) * rows] for micro in range(micro_batches)]
    weight = 1 / (BATCH * SEQ)
    return [Pass(SESSION, EPOCH, 0, step, micro, (part[:, :-1], part[:, 1:]), (0.0, weight), ()) for micro, part in enumerate(parts)]


def losses(execution: Execution, steps: Sequence[int], micro_batches: int) -> list[float]:
    """Train, and give the loss of each step."""
    found = []
    for step in steps:
        for job in jobs(step, micro_batches):
            execution.run(job)
        found.append(sum(loss for _, _, loss in execution.settle(step)()[1]))
    return found


def tensors_of(execution: Execution) -> dict[str, HostArray]:
    """All that a checkpoint would hold."""
    return execution.snapshot()()[0]


def evaluations(step: int, rows: int) -> list[Evaluate]:
    """Micro-batches of so many rows, the last one shorter, of which the last targets count for nothing."""
    ids = tokens(1000)
    ids[-1, 3:] = -1
    found = []
    for micro, first in enumerate(range(0, BATCH, rows)):
        part = ids[first : first + rows]
        counted = int((part[:, 1:] >= 0).sum())
        inputs = (np.maximum(part[:, :-1], 0), part[:, 1:])
        found.append(Evaluate(SESSION, EPOCH, 0, step, micro, inputs, (0.0, 1 / counted)))
    return found


@pytest.mark.parametrize("fuse", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("backend", [NumpyBackend, WholeBackend, emulated])
def test_a_validation_leaves_no_trace_in_training(backend: Callable[[], Backend], fuse: bool) -> None:
    """With validations between steps, of other numbers of rows, losses and tensors have the same bits, recorded passes included."""
    plain, validated = make(backend(), fuse=fuse), make(backend(), fuse=fuse)
    expected = losses(plain, (1, 2, 3), 2)
    found = []
    for step in (1, 2, 3):
        found += losses(validated, (step,), 2)
        once, again = ([validated.evaluate(job)() for job in evaluations(step, 4)] for _ in range(2))
        assert [one.losses for one in once] == [one.losses for one in again]
        assert not validated._segments[0].tapes
    assert found == expected
    for name, tensor in tensors_of(validated).items():
        np.testing.assert_array_equal(tensor, tensors_of(plain)[name], err_msg=name)


def test_a_validation_has_no_dropout_and_is_a_mean_over_its_targets() -> None:
    """However the rows are cut it is the same number, and that of a network without dropout."""
    dry = make(text=TINY.replace("rate: 0.2", "rate: 0.0"))
    whole = evaluations(1, BATCH)
    ((_, expected),) = dry.evaluate(whole[0])().losses
    ((_, found),) = make().evaluate(whole[0])().losses
    assert found == expected
    counted = [int((job.inputs[1] >= 0).sum()) for job in evaluations(1, 4)]
    parts = [make().evaluate(job)().losses[0][1] * count for job, count in zip(evaluations(1, 4), counted, strict=True)]
    assert sum(parts) / sum(counted) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shards", [1, 2, 4, 9])
def test_threads_only_decide_how_many_shards_run_at_once(shards: int) -> None:
    """One, two and three threads give the same bits, with fewer and with more shards than rows."""
    runs = []
    for threads in (1, 2, 3):
        execution = make(threads=threads, hyper={"lr": 0.01, "shards": shards})
        runs.append((losses(execution, (1, 2, 3), 2), tensors_of(execution)))
    for other, tensors in runs[1:]:
        assert other == runs[0][0]
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor, runs[0][1][name], err_msg=name)


def test_shards_and_micro_batches_change_no_more_than_rounding() -> None:
    """Dropout masks and gradients are those of the whole batch, however it is cut."""
    whole = losses(make(WholeBackend(), micro_batches=1), (1, 2, 3), 1)
    assert losses(make(micro_batches=1, hyper={"lr": 0.01, "shards": 3}), (1, 2, 3), 1) == pytest.approx(whole, rel=1e-5)
    assert losses(make(micro_batches=3, hyper={"lr": 0.01, "shards": 2}), (1, 2, 3), 3) == pytest.approx(whole, rel=1e-5)


def test_uneven_micro_batches_fold_every_shard_that_was_written() -> None:
    """Five rows in micro-batches of 2 and 3 with three shards: the third shard is first written by the second micro-batch."""
    deploy, plan = alone(batch=5, micro_batches=2, hyper={"shards": 3})
    execution = Execution(NumpyBackend(), Crew(1), deploy, plan)
    execution.load(None)
    whole_deploy, whole_plan = alone(batch=5, micro_batches=1, hyper={"shards": 1})
    whole = Execution(NumpyBackend(), Crew(1), whole_deploy, whole_plan)
    whole.load(None)
    ids = tokens(1)[:5]
    for at, (first, last) in enumerate(((0, 2), (2, 5))):
        execution.run(Pass(SESSION, deploy.epoch, 0, 1, at, (ids[first:last, :-1], ids[first:last, 1:]), (0.0, 0.04), ()))
    whole.run(Pass(SESSION, deploy.epoch, 0, 1, 0, (ids[:, :-1], ids[:, 1:]), (0.0, 0.04), ()))
    norms, finite = execution.fold()()
    expected, _ = whole.fold()()
    assert finite
    assert norms == pytest.approx(expected, rel=1e-4)


def test_settling_equals_folding_deciding_and_applying() -> None:
    """A PNode that decides for itself does what a trainer would make it do."""
    hyper = {"lr": 0.01, "clip_norm": 0.3, "weight_decay": 0.1}
    alone_here, told = make(hyper=hyper), make(hyper=hyper)
    state = ScalerState()
    for step in (1, 2, 3):
        for job in jobs(step, 2):
            alone_here.run(job)
            told.run(job)
        alone_here.settle(step)()
        norms, finite = told.fold()()
        verdict = decide(Hyper.model_validate(hyper), 100, step, state, list(norms.values()), finite)
        state = verdict.state
        told.apply(verdict.skip, StepNumbers(state.updates, verdict.lr, verdict.lr_factor, verdict.grad_factor), state.loss_scale)
    assert alone_here.state == state
    for name, tensor in tensors_of(alone_here).items():
        np.testing.assert_array_equal(tensor, tensors_of(told)[name], err_msg=name)


def test_a_skipped_step_changes_nothing_but_the_scale() -> None:
    """An overflow of the scaled loss skips, halves the scale, and the next step is unharmed."""
    scaler = ScalerState(loss_scale=2.0**40, dynamic=True)
    execution = make(scaler=scaler, text=TINY.replace("name: tiny", "name: tiny\nprecision: fp16"))
    before = tensors_of(execution)
    for job in jobs(1, 2):
        execution.run(job)
    verdict = execution.settle(1)()[0].verdict
    assert verdict.skip
    assert (execution.state.loss_scale, execution.state.updates) == (2.0**39, 0)
    for name, tensor in tensors_of(execution).items():
        np.testing.assert_array_equal(tensor, before[name], err_msg=name)


@pytest.mark.parametrize("done", [1, 2, 3], ids=["half", "all", "folded"])
@pytest.mark.parametrize("backend", [NumpyBackend, emulated])
def test_a_step_that_is_begun_again_gives_the_same_bits(backend: Callable[[], Backend], done: int) -> None:
    """Aborted with one of two micro-batches done, with both, and after folding; in the first steps and later: as if nothing had been."""
    calm, shaken = make(backend(), hyper={"lr": 0.01}), make(backend(), hyper={"lr": 0.01})
    expected, found = [], []
    for step in (1, 2, 3, 4):
        expected += losses(calm, (step,), 2)
        for job in jobs(step, 2)[:done]:
            shaken.run(job)
        if done == 3:
            shaken.fold()()
        shaken.abort()
        found += losses(shaken, (step,), 2)
    assert found == expected
    for name, tensor in tensors_of(shaken).items():
        np.testing.assert_array_equal(tensor, tensors_of(calm)[name], err_msg=name)


def test_an_aborted_forward_leaves_no_tape() -> None:
    """A forward whose backward never came is forgotten, and the next attempt has its own."""
    deploy = deploy_of(only_on_b("up"))
    execution = Execution(NumpyBackend(), Crew(1), deploy, make_plan(deploy, A))
    execution.load(None)
    ids = tokens(1)[:3, :-1]
    forward = Pass(SESSION, deploy.epoch, 0, 1, 0, (ids,), (0.0,), None)
    first = execution.run(forward)().outputs
    execution.abort()
    assert all(not run.tapes for run in execution._segments.values())
    for before, again in zip(first, execution.run(forward)().outputs, strict=True):
        np.testing.assert_array_equal(before.array, again.array)


def test_a_copy_is_not_touched_by_later_steps() -> None:
    """What was copied after step 1 is still that after step 2, and after a session that was loaded from it trained on."""
    first = make()
    losses(first, (1,), 2)
    copy = tensors_of(first)
    as_it_was = {name: tensor.copy() for name, tensor in copy.items()}
    deploy, plan = alone(scaler=first.state, step=1)
    second = Execution(NumpyBackend(), Crew(1), deploy, plan)
    second.load(copy)
    losses(first, (2,), 2)
    losses(second, (2,), 2)
    for name, tensor in copy.items():
        np.testing.assert_array_equal(tensor, as_it_was[name], err_msg=name)


def test_a_step_does_not_add_to_the_gradients_of_the_one_before() -> None:
    """The same batch twice, without an update in between, has the same norms."""
    execution = make()
    folded = []
    for _ in range(2):
        for job in jobs(1, 2):
            execution.run(job)
        folded.append(execution.fold()())
        execution.apply(True, StepNumbers(0, 0.0, 0.0, 0.0), 1.0)
    assert folded[0] == folded[1]


def test_a_loaded_snapshot_goes_on_as_if_nothing_had_happened() -> None:
    """Weights and moments of step 2, loaded elsewhere, give the same step 3."""
    first = make()
    losses(first, (1, 2), 2)
    deploy, plan = alone(scaler=first.state, step=2)
    second = Execution(NumpyBackend(), Crew(1), deploy, plan)
    second.load(tensors_of(first))
    assert losses(second, (3, 4), 2) == losses(first, (3, 4), 2)
