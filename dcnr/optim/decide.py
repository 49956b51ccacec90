"""The decision that ends a step: apply or skip, with which learning rate and factors.

One pure function, called by the trainer, or by a PNode that holds a whole network. Loss scaling after Micikevicius et al. 2018:
an overflow halves the scale and skips the step everywhere; `loss_scale_window` good steps double it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dcnr.optim.hyper import Hyper
from dcnr.optim.schedule import lr_factor

MAX_LOSS_SCALE = 2.0**24
MIN_LOSS_SCALE = 2.0**-14
FIRST_LOSS_SCALE = 2.0**16


@dataclass(frozen=True, slots=True)
class ScalerState:
    """What one step's decision hands to the next."""

    updates: int = 0
    """Optimizer updates done; skipped steps do not count."""
    loss_scale: float = 1.0
    good_steps: int = 0
    """Applied steps since the scale last changed."""
    dynamic: bool = False
    """Whether the scale moves; otherwise it stays, and an overflow only skips."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What every VNode does with this step, and the state after it. `grad_norm` is unscaled and unclipped."""

    skip: bool
    lr: float
    lr_factor: float
    grad_factor: float
    grad_norm: float
    state: ScalerState


def initial_state(hyper: Hyper, float16: bool) -> ScalerState:
    """The state before step 1; `float16`: any parameter or activation of the network is stored so."""
    if hyper.loss_scale is not None:
        return ScalerState(loss_scale=hyper.loss_scale, dynamic=True)
    return ScalerState(loss_scale=FIRST_LOSS_SCALE, dynamic=True) if float16 else ScalerState()


def decide(hyper: Hyper, total_steps: int, step: int, state: ScalerState, squared_norms: Sequence[float], finite: bool) -> Verdict:
    """Decide step `step` (counted from 1). `squared_norms` are of the scaled gradients, one per VNode, in node order."""
    factor = lr_factor(hyper, step, hyper.decay_steps or total_steps)
    norm = math.sqrt(in_order(squared_norms)) / state.loss_scale if finite else math.inf
    if not math.isfinite(norm):
        scale = max(MIN_LOSS_SCALE, state.loss_scale / 2) if state.dynamic else state.loss_scale
        return Verdict(True, hyper.lr * factor, factor, 0.0, norm, replace(state, loss_scale=scale, good_steps=0))
    grad_factor = clip_factor(hyper, norm) / state.loss_scale
    return Verdict(False, hyper.lr * factor, factor, grad_factor, norm, _after_update(state, hyper))


def in_order(numbers: Iterable[float]) -> float:
    """Their sum from left to right, rounded at each step; `sum` does more than that since Python 3.12, and a device does not."""
    return functools.reduce(operator.add, numbers, 0.0)


def clip_factor(hyper: Hyper, norm: float) -> float:
    """What gradients of this norm are multiplied by, so that it is at most `clip_norm`."""
    return min(1.0, hyper.clip_norm / (norm + 1e-6)) if hyper.clip_norm else 1.0


def _after_update(state: ScalerState, hyper: Hyper) -> ScalerState:
    state = replace(state, updates=state.updates + 1, good_steps=state.good_steps + 1)
    if not state.dynamic or state.good_steps < hyper.loss_scale_window:
        return state
    return replace(state, loss_scale=min(MAX_LOSS_SCALE, state.loss_scale * 2), good_steps=0)
