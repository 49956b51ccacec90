"""The end of a step on a device: the same decisions and weights as on a host, without waiting for any of them.

The device is a GPU whose kernels run on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dcnr.agents.commands import Pass
from dcnr.agents.crew import Crew
from dcnr.agents.ending import DeviceEnding, HostEnding, Settlement
from dcnr.agents.execution import Execution
from dcnr.backends.base import Backend, HostArray
from dcnr.backends.cupy.backend import CupyBackend
from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.ids import Epoch
from dcnr.optim.decide import ScalerState
from dcnr.optim.update import StepNumbers
from tests.agents.tiny import SEQ, SESSION, TINY, VOCABULARY, alone
from tests.backends.cupy.emulator.device import EmulatedDevice
from tests.tolerances import assert_close

BATCH, STEPS = 6, (1, 2, 3, 4)
EPOCH = Epoch(1)
"""Of every deploy here."""
HYPER = {"lr": 0.01, "clip_norm": 0.3, "weight_decay": 0.1, "loss_scale_window": 2, "shards": 1}
HALF = TINY.replace("name: tiny", "name: tiny\nprecision: fp16")


def gpu() -> Backend:
    """A fresh one."""
    return CupyBackend(EmulatedDevice(90))


def make(backend: Backend, text: str = TINY, scaler: ScalerState | None = None, window: int = 2) -> Execution:
    """The tiny network in two micro-batches, loaded from the seed. `window`: steps until the loss scale is doubled."""
    hyper = {**HYPER, "loss_scale_window": window}
    deploy, plan = alone(hyper=hyper, text=text, scaler=scaler or ScalerState(), batch=BATCH, micro_batches=2)
    execution = Execution(backend, Crew(1), deploy, plan)
    execution.load(None)
    return execution


def feed(execution: Execution, step: int, tokens_BS: HostArray | None = None) -> None:
    """A step's micro-batches; of random ids, if of no others."""
    ids = np.random.default_rng(step).integers(0, VOCABULARY, (BATCH, SEQ + 1)) if tokens_BS is None else tokens_BS
    for micro in (0, 1):
        part = ids[3 * micro : 3 * micro + 3]
        execution.run(Pass(SESSION, EPOCH, 0, step, micro, (part[:, :-1], part[:, 1:]), (0.0, 1 / (BATCH * SEQ)), ()))


def train(execution: Execution, steps: Sequence[int]) -> list[tuple[Settlement, float]]:
    """All steps are issued before the first is asked for."""
    laters = []
    for step in steps:
        feed(execution, step)
        laters.append(execution.settle(step))
    found = [later() for later in laters]
    return [(settlement, sum(loss for _, _, loss in losses)) for settlement, losses in found]


def tensors_of(execution: Execution) -> dict[str, HostArray]:
    """All that a checkpoint would hold."""
    return execution.snapshot()()[0]


def test_a_device_decides_as_a_host_does() -> None:
    """Losses, norms, clipping, learning rates and weights of four steps in flight at once."""
    here, there = make(NumpyBackend()), make(gpu())
    assert isinstance(here._ending, HostEnding)
    assert isinstance(there._ending, DeviceEnding)
    for (on_host, host_loss), (on_device, device_loss) in zip(train(here, STEPS), train(there, STEPS), strict=True):
        assert_close(device_loss, host_loss, "float32", "loss")
        assert_close(on_device.verdict.grad_norm, on_host.verdict.grad_norm, "float32", "norm")
        assert (on_device.verdict.lr, on_device.verdict.skip, on_device.verdict.state) == (
            on_host.verdict.lr, on_host.verdict.skip, on_host.verdict.state,
        )  # fmt: skip
    assert here.state == there.state
    theirs = tensors_of(there)
    for name, tensor in tensors_of(here).items():
        assert_close(theirs[name], tensor, "float16", name)  # Adam turns the rounding of tiny gradients into steps of its own size


@pytest.mark.timeout(300)
def test_two_hundred_steps_in_half_precision_follow_the_definition() -> None:
    """Text, dropout, clipping, and overflows at the start: rounding does not add up, and both skip the same steps.

    The scale does not grow again: at its limit an overflow is a matter of rounding, and a step that only one skips is another run.
    """
    text = np.frombuffer(TINY.encode(), np.uint8).astype(np.int64) % VOCABULARY
    runs, states = [], []
    for backend in (NumpyBackend(), gpu()):
        execution = make(backend, HALF, ScalerState(loss_scale=2.0**26, dynamic=True), window=1000)
        losses = []
        for step in range(1, 201):
            starts = np.random.default_rng(step).integers(0, len(text) - SEQ, BATCH)
            feed(execution, step, np.stack([text[start : start + SEQ + 1] for start in starts]))
            losses.append(sum(loss for _, _, loss in execution.settle(step)()[1]))
        runs.append(losses)
        states.append(execution.state)
    assert states[0] == states[1]
    assert runs[0][-1] < runs[0][0]
    assert_close(runs[1], runs[0], "float16", "losses")


def test_the_device_learns_of_an_overflow_by_itself() -> None:
    """Scales that are too large are halved step by step, nothing is applied, and Adam's count stands still meanwhile."""
    execution = make(gpu(), HALF, ScalerState(loss_scale=2.0**26, dynamic=True))
    before = tensors_of(execution)
    settled = [settlement for settlement, _ in train(execution, range(1, 14))]
    skipped = [settlement.verdict.skip for settlement in settled]
    assert skipped[0]
    assert not skipped[-1]
    applied = skipped.count(False)
    assert execution.state.updates == applied
    scales = [settlement.loss_scale for settlement in settled]
    assert scales[: skipped.index(False) + 1] == [2.0 ** (26 - halvings) for halvings in range(skipped.index(False) + 1)]
    assert any(not np.array_equal(tensor, before[name]) for name, tensor in tensors_of(execution).items())


def test_two_runs_on_a_device_are_equal_to_the_last_bit() -> None:
    """Whatever is recorded and replayed."""
    first, second = make(gpu(), HALF), make(gpu(), HALF)
    assert train(first, STEPS) == train(second, STEPS)
    theirs = tensors_of(second)
    for name, tensor in tensors_of(first).items():
        np.testing.assert_array_equal(tensor, theirs[name], err_msg=name)


def test_a_trainer_that_decides_gets_the_same_weights() -> None:
    """Measured on the device, decided elsewhere, updated on the device."""
    alone_here, told = make(gpu()), make(gpu())
    for step in STEPS[:2]:
        feed(alone_here, step)
        verdict = alone_here.settle(step)()[0].verdict
        feed(told, step)
        norms, finite = told.fold()()
        assert finite
        assert sum(norms.values()) ** 0.5 == verdict.grad_norm
        numbers = StepNumbers(verdict.state.updates, verdict.lr, verdict.lr_factor, verdict.grad_factor)
        told.apply(False, numbers, verdict.state.loss_scale)
    theirs = tensors_of(told)
    for name, tensor in tensors_of(alone_here).items():
        np.testing.assert_array_equal(tensor, theirs[name], err_msg=name)


def test_a_snapshot_is_of_the_step_behind_which_it_was_asked_for() -> None:
    """Steps that are issued later do not change it."""
    first, second = make(gpu()), make(gpu())
    train(first, (1,))
    expected = tensors_of(first)
    feed(second, 1)
    second.settle(1)
    taken = second.snapshot()
    feed(second, 2)
    second.settle(2)
    for name, tensor in taken()[0].items():
        np.testing.assert_array_equal(tensor, expected[name], err_msg=name)


def test_a_loaded_state_goes_on_as_if_nothing_had_happened() -> None:
    """Weights, moments, count and scale of step 2, loaded elsewhere, give the same step 3."""
    first = make(gpu())
    train(first, (1, 2))
    deploy, plan = alone(hyper=HYPER, scaler=first.state, step=2, batch=BATCH, micro_batches=2)
    second = Execution(gpu(), Crew(1), replace(deploy), plan)
    second.load(tensors_of(first))
    assert train(second, (3, 4)) == train(first, (3, 4))
