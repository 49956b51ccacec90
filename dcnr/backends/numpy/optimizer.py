"""Folding of shard gradients, and the optimizer updates, in place. N: all elements of a parameter, S: shards."""

from __future__ import annotations

import math

import numpy as np

from dcnr.backends.base import AdamStep, HostArray, SgdStep
from dcnr.backends.numpy.wide import quiet


class OptimizerOps:
    """Everything after the last backward of a step."""

    @quiet
    def fold_shards(self, grads_SN: HostArray) -> tuple[float, bool]:
        """grads[0] += grads[1] += …; an infinity or NaN anywhere shows in the sum of squares."""
        for shard in grads_SN[1:]:
            grads_SN[0] += shard
        squares = float(np.square(grads_SN[0], dtype=np.float64).sum())
        return squares, math.isfinite(squares)

    @quiet
    def add_into(self, into: HostArray, x: HostArray) -> None:
        """into += x."""
        into += x

    @quiet
    def adam(self, step: AdamStep, w: HostArray, g: HostArray, m: HostArray, v: HostArray, low: HostArray | None) -> None:
        """Kingma & Ba 2015, with the decay of Loshchilov & Hutter 2019."""
        grad = g * step.grad_factor
        m[...] = step.beta1 * m + (1 - step.beta1) * grad
        v[...] = step.beta2 * v + (1 - step.beta2) * grad * grad
        w *= 1 - step.lr * step.weight_decay
        w -= step.lr * (m / step.correction1) / (np.sqrt(v / step.correction2) + step.eps)
        if low is not None:
            low[...] = w

    @quiet
    def sgd(self, step: SgdStep, w: HostArray, g: HostArray, m: HostArray | None, low: HostArray | None) -> None:
        """m = momentum * m + g; w -= lr * (m + weight_decay * w)."""
        update = g * step.grad_factor
        if m is not None:
            m[...] = step.momentum * m + update
            update = m
        w -= step.lr * (update + step.weight_decay * w)
        if low is not None:
            low[...] = w
