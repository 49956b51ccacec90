"""The decision that ends a step."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.nodes.spec import NodeConfig
from dcnr.optim.decide import FIRST_LOSS_SCALE, MAX_LOSS_SCALE, MIN_LOSS_SCALE, ScalerState, decide, initial_state
from dcnr.optim.hyper import Hyper
from dcnr.optim.update import StepNumbers, update_of

HYPER = Hyper(lr=0.1, clip_norm=1.0, loss_scale_window=3)
DYNAMIC = ScalerState(loss_scale=1024.0, dynamic=True)


def test_the_first_scale() -> None:
    """Large for float16, none otherwise, and what the user says before both."""
    assert initial_state(Hyper(), float16=True) == ScalerState(loss_scale=FIRST_LOSS_SCALE, dynamic=True)
    assert initial_state(Hyper(), float16=False) == ScalerState()
    assert initial_state(Hyper(loss_scale=8), float16=False) == ScalerState(loss_scale=8, dynamic=True)


def test_an_overflow_skips_and_halves() -> None:
    """The count of updates stands still, the count of good steps starts again."""
    state = ScalerState(updates=7, loss_scale=1024, good_steps=2, dynamic=True)
    verdict = decide(HYPER, 10, 8, state, [1.0], finite=False)
    assert (verdict.skip, verdict.grad_norm) == (True, math.inf)
    assert verdict.state == ScalerState(updates=7, loss_scale=512, good_steps=0, dynamic=True)


def test_norms_that_add_up_to_infinity_skip_too() -> None:
    """Each finite, the sum not; and NaN."""
    for norms in ([1e308, 1e308], [math.nan]):
        assert decide(HYPER, 10, 1, DYNAMIC, norms, finite=True).skip


def test_good_steps_double_the_scale() -> None:
    """After the window, up to a bound."""
    state, scales = DYNAMIC, []
    for step in range(1, 7):
        state = decide(HYPER, 10, step, state, [1.0], finite=True).state
        scales.append(state.loss_scale)
    assert scales == [1024, 1024, 2048, 2048, 2048, 4096]
    assert state.updates == 6
    top = ScalerState(loss_scale=MAX_LOSS_SCALE, good_steps=2, dynamic=True)
    assert decide(HYPER, 10, 1, top, [1.0], finite=True).state.loss_scale == MAX_LOSS_SCALE


def test_a_scale_never_falls_below_its_bound_and_a_fixed_one_never_moves() -> None:
    """An overflow without scaling only skips."""
    low = ScalerState(loss_scale=MIN_LOSS_SCALE, dynamic=True)
    assert decide(HYPER, 10, 1, low, [], finite=False).state.loss_scale == MIN_LOSS_SCALE
    assert decide(HYPER, 10, 1, ScalerState(), [], finite=False).state == ScalerState()


def test_the_norm_is_unscaled_and_clipping_scales_down_to_it() -> None:
    """Norm 5 at clip 1: the gradient that is applied has norm 1; a small one is left alone."""
    squares = [(3.0 * 1024) ** 2, (4.0 * 1024) ** 2]
    verdict = decide(HYPER, 10, 1, DYNAMIC, squares, finite=True)
    assert verdict.grad_norm == pytest.approx(5)
    assert verdict.grad_factor * math.sqrt(sum(squares)) == pytest.approx(1, rel=1e-6)
    small = decide(HYPER, 10, 1, DYNAMIC, [512.0**2], finite=True)
    assert small.grad_factor == 1 / 1024
    assert decide(Hyper(), 10, 1, DYNAMIC, squares, finite=True).grad_factor == 1 / 1024


def test_the_schedule_is_in_the_verdict() -> None:
    """decay_steps, or the session's last step."""
    hyper = Hyper(lr=0.1, schedule="linear")
    assert decide(hyper, 4, 1, ScalerState(), [1.0], finite=True).lr == pytest.approx(0.075)
    assert decide(Hyper(lr=0.1, schedule="linear", decay_steps=2), 4, 1, ScalerState(), [1.0], finite=True).lr_factor == 0.5


def test_a_skipped_step_leaves_no_trace_in_the_weights() -> None:
    """Three steps with an overflow in the middle equal two without it: Adam's count did not advance."""
    backend, hyper = NumpyBackend(), Hyper(optimizer="adam", lr=0.1)
    gradients = [np.array([1.0, -2.0], np.float32), np.array([np.inf, 0.0], np.float32), np.array([0.5, 3.0], np.float32)]

    def train(given: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]], scale: float) -> list[float]:
        w, m, v = (np.zeros(2, np.float32) for _ in range(3))
        state = ScalerState(loss_scale=scale, dynamic=True)
        for step, gradient in enumerate(given, 1):
            grads = (gradient * np.float32(state.loss_scale))[None].copy()
            squares, finite = backend.fold_shards(grads)
            verdict = decide(hyper, 3, step, state, [squares], finite)
            state = verdict.state
            if not verdict.skip:
                numbers = StepNumbers(state.updates, verdict.lr, verdict.lr_factor, verdict.grad_factor)
                update = update_of(hyper, NodeConfig(), True, numbers)
                backend.adam(update, w, grads[0], m, v, None)  # type: ignore[arg-type]
        return [float(x) for x in w]

    assert train(gradients, 1024) == train([gradients[0], gradients[2]], 1024)
