"""Activations, dropout and random masks."""

from __future__ import annotations

import math

import numpy as np

from dcnr.backends.base import Activation, HostArray, Philox, dropout_scale
from dcnr.backends.numpy.random import keep_mask
from dcnr.backends.numpy.wide import like, quiet, wide

_erf = np.vectorize(math.erf, otypes=[np.float64])


def sigmoid(x: HostArray) -> HostArray:
    """1 / (1 + exp(-x)); exp may overflow to infinity, which gives the right 0."""
    return np.asarray(1 / (1 + np.exp(-x)))


def normal_cdf(x: HostArray) -> HostArray:
    """Distribution function of the standard normal."""
    return like(0.5 * (1 + _erf(x / math.sqrt(2))), x)


def activate(kind: Activation, x: HostArray) -> HostArray:
    """The formulas, in the dtype of `x`."""
    match kind:
        case "relu":
            return np.maximum(x, 0)
        case "gelu":
            return x * normal_cdf(x)
        case "silu":
            return x * sigmoid(x)
        case "swiglu":
            value, gate = np.split(x, 2, axis=-1)
            return np.asarray(value * gate * sigmoid(gate))


def activate_backward(kind: Activation, dy: HostArray, x: HostArray) -> HostArray:
    """dy times the derivative at `x`."""
    match kind:
        case "relu":
            return np.where(x > 0, dy, 0).astype(dy.dtype)
        case "gelu":
            density = np.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
            return np.asarray(dy * (normal_cdf(x) + x * density))
        case "silu":
            return dy * _silu_slope(x)
        case "swiglu":
            value, gate = np.split(x, 2, axis=-1)
            return np.concatenate([dy * gate * sigmoid(gate), dy * value * _silu_slope(gate)], axis=-1)


def dropped(x: HostArray, rate: float, rng: Philox) -> HostArray:
    """Dropout, in the dtype of `x`."""
    return np.where(keep_mask(x, rate, rng), x * dropout_scale(rate), x.dtype.type(0))


def _silu_slope(x: HostArray) -> HostArray:
    s = sigmoid(x)
    return np.asarray(s * (1 + x * (1 - s)))


class ActivationOps:
    """Element-wise operations with a derivative of their own."""

    @quiet
    def activate(self, kind: Activation, x: HostArray) -> HostArray:
        """Element-wise, except swiglu, which halves the last axis."""
        return like(activate(kind, wide(x)), x)

    @quiet
    def activate_backward(self, kind: Activation, dy: HostArray, x: HostArray) -> HostArray:
        """dx, shaped as x."""
        return like(activate_backward(kind, wide(dy), wide(x)), dy)

    @quiet
    def dropout(self, x: HostArray, rate: float, rng: Philox, residual: HostArray | None = None) -> HostArray:
        """keep * x * dropout_scale(rate) (+ residual)."""
        y = dropped(wide(x), rate, rng)
        return like(y if residual is None else y + wide(residual), x)

    def random_mask(self, x: HostArray, rate: float, rng: Philox) -> HostArray:
        """keep * x."""
        return np.where(keep_mask(x, rate, rng), x, x.dtype.type(0))
