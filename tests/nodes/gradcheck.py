"""Gradients against finite differences in float64, on the living definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from dcnr.backends.base import HostArray
from dcnr.backends.numpy.backend import NumpyBackend
from tests.nodes.cases import Case
from tests.nodes.runs import LOSS_SCALE, Example, example, forward, run
from tests.tolerances import assert_close

H = 1e-5
"""Step of the central difference: its error is about H**2, that of rounding about 1e-16 / H."""
COORDINATES = 12
DIRECTIONS = 3


def gradcheck(case: Case) -> None:
    """Every input and every parameter: some coordinates one by one, and all of them at once along random directions.

    A first micro-batch writes to the accumulators, a second one adds.
    """
    backend = NumpyBackend()
    given = example(case, backend)
    outcome = run(backend, case, given, "float64")
    slope = partial(_slope, backend, case, given)
    for slot, grad in enumerate(outcome.input_grads):
        has_gradient = case.ids[slot] is None and not (case.is_cost and slot == 1)
        assert (grad is not None) == has_gradient, f"input {slot} of {case.name}: gradient is {grad}"
        if grad is not None:
            _compare(f"input {slot}", given.inputs[slot], grad, partial(_with_input, given, slot), slope)
    assert set(outcome.param_grads) == set(given.params)
    twice = run(backend, case, given, "float64", micro_batches=2)
    for name, grad in outcome.param_grads.items():
        _compare(name, given.params[name], grad, partial(_with_parameter, given, name), slope)
        assert_close(twice.param_grads[name], 2 * grad, "float64", f"{name} after two micro-batches")


def _slope(backend: NumpyBackend, case: Case, given: Example, plus: Example, minus: Example) -> float:
    """Change of the sum of outputs * their gradients (of a cost: of the scaled loss), per unit of step."""
    after, before = forward(backend, case, plus, "float64"), forward(backend, case, minus, "float64")
    weights = given.grads or (np.array(LOSS_SCALE),)
    return sum(float(((a - b) * weight).sum()) for a, b, weight in zip(after, before, weights, strict=True)) / (2 * H)


def _compare(
    what: str,
    x: HostArray,
    grad: HostArray,
    changed: Callable[[HostArray], Example],
    slope: Callable[[Example, Example], float],
) -> None:
    draw = np.random.default_rng(7)
    assert grad.shape == x.shape, f"{what}: gradient of shape {grad.shape} for {x.shape}"
    steps = [_unit(x, int(index)) for index in draw.permutation(x.size)[:COORDINATES]]
    steps += [draw.normal(size=x.shape) / np.sqrt(x.size) for _ in range(DIRECTIONS)]
    scale = max(float(np.abs(grad).max()), 1e-3)  # where the gradient is zero, rounding must not count as an error
    numeric = [slope(changed(x + H * step), changed(x - H * step)) for step in steps]
    assert_close([*(float((grad * step).sum()) for step in steps), scale], [*numeric, scale], "float64", what)


def _unit(x: HostArray, index: int) -> npt.NDArray[np.float64]:
    step = np.zeros(x.size)
    step[index] = 1
    return step.reshape(x.shape)


def _with_input(given: Example, slot: int, x: HostArray) -> Example:
    return replace(given, inputs=(*given.inputs[:slot], x, *given.inputs[slot + 1 :]))


def _with_parameter(given: Example, name: str, x: HostArray) -> Example:
    return replace(given, params={**given.params, name: x})
