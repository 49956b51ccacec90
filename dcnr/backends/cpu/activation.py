"""The kernels of activations, one row at a time, with the bias of the product before them and its gradient.

Shape suffixes: R rows, D columns of the pre-activation, F columns of the result (D, or D / 2 for swiglu).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dcnr.backends.base import Activation
from dcnr.backends.cpu.casts import narrow, wide
from dcnr.backends.cpu.functions import F4, erf, exp, sigmoid
from dcnr.backends.cpu.jit import exact, inner, kernel
from dcnr.backends.cpu.pool import Pool

Floats = npt.NDArray[Any]
NOTHING = np.empty(0, np.float32)
"""Stands for a missing vector in kernels."""

RELU, GELU, SILU, SWIGLU = 0, 1, 2, 3
CODES: dict[Activation, int] = {"relu": RELU, "gelu": GELU, "silu": SILU, "swiglu": SWIGLU}
HALF_ROOT = F4(0.70710678118654752)
"""1 / sqrt(2)"""
DENSITY = F4(0.39894228040143268)
"""1 / sqrt(2 pi)"""


@inner
def relu_row(x: Floats, y: Floats) -> None:
    for d in range(x.size):
        y[d] = F4(0) if x[d] < F4(0) else x[d]


@inner
def gelu_row(x: Floats, y: Floats) -> None:
    for d in range(x.size):
        y[d] = F4(0.5) * x[d] * (F4(1) + erf(x[d] * HALF_ROOT))


@inner
def silu_row(x: Floats, y: Floats) -> None:
    for d in range(x.size):
        y[d] = x[d] * sigmoid(x[d])


@inner
def swiglu_row(value: Floats, gate: Floats, y: Floats) -> None:
    for d in range(y.size):
        y[d] = value[d] * (gate[d] * sigmoid(gate[d]))


@inner
def relu_back_row(dy: Floats, x: Floats, dx: Floats) -> None:
    for d in range(x.size):
        dx[d] = dy[d] if x[d] > F4(0) else F4(0)


@exact
def gelu_slope(x: np.float32) -> np.float32:
    """Phi(x) + x phi(x). Phi by Abramowitz & Stegun 7.1.26 (absolute error 8e-8), whose e**(-x^2 / 2) is the one that phi needs."""
    a = (-x if x < F4(0) else x) * HALF_ROOT
    t = F4(1) / (F4(1) + F4(0.3275911) * a)
    p = F4(1.061405429)
    p = p * t + F4(-1.453152027)
    p = p * t + F4(1.421413741)
    p = p * t + F4(-0.284496736)
    p = p * t + F4(0.254829592)
    e = exp(F4(-0.5) * (x * x))
    tail = F4(0.5) * p * t * e
    return (tail if x < F4(0) else F4(1) - tail) + x * DENSITY * e


@inner
def gelu_back_row(dy: Floats, x: Floats, dx: Floats) -> None:
    for d in range(x.size):
        dx[d] = dy[d] * gelu_slope(x[d])


@inner
def silu_back_row(dy: Floats, x: Floats, dx: Floats) -> None:
    for d in range(x.size):
        s = sigmoid(x[d])
        dx[d] = dy[d] * (s + x[d] * s * (F4(1) - s))


@inner
def swiglu_back_row(dy: Floats, value: Floats, gate: Floats, dvalue: Floats, dgate: Floats) -> None:
    for d in range(dy.size):
        s = sigmoid(gate[d])
        silu = gate[d] * s
        dvalue[d] = dy[d] * silu
        dgate[d] = dy[d] * value[d] * (s + silu * (F4(1) - s))


@inner
def add_row(into: Floats, x: Floats) -> None:
    for d in range(into.size):
        into[d] += x[d]


@kernel("void(f4[:,::1], f4[::1])")
def add_bias(y_RD: Floats, b_D: Floats) -> None:
    """y += b."""
    for r in range(y_RD.shape[0]):
        add_row(y_RD[r], b_D)


@kernel("void(f4[:,::1], f4[::1], b1)")
def column_sums(dy_RD: Floats, into_D: Floats, accumulate: bool) -> None:
    """into (+)= sum of the rows, in order."""
    if not accumulate:
        into_D[:] = F4(0)
    for r in range(dy_RD.shape[0]):
        add_row(into_D, dy_RD[r])


@kernel("void(i8, f4[:,::1], f4[::1], f4[:,::1])")
def activate_rows(kind: int, pre_RD: Floats, b_D: Floats, y_RF: Floats) -> None:
    """pre += b (unless b is empty), y = activation(pre)."""
    width = y_RF.shape[1]
    for r in range(pre_RD.shape[0]):
        x = pre_RD[r]
        y = y_RF[r]
        if b_D.size:
            add_row(x, b_D)
        if kind == RELU:
            relu_row(x, y)
        elif kind == GELU:
            gelu_row(x, y)
        elif kind == SILU:
            silu_row(x, y)
        else:
            swiglu_row(x[:width], x[width:], y)


@kernel("void(i8, f4[:,::1], f4[:,::1], f4[:,::1], f4[::1], b1)")
def activate_rows_backward(kind: int, dy_RF: Floats, pre_RD: Floats, dpre_RD: Floats, into_b_D: Floats, accumulate: bool) -> None:
    """dpre = dy * activation'(pre); into_b (unless empty) (+)= the sum of its rows."""
    width = dy_RF.shape[1]
    if not accumulate:
        into_b_D[:] = F4(0)
    for r in range(pre_RD.shape[0]):
        dy = dy_RF[r]
        x = pre_RD[r]
        dx = dpre_RD[r]
        if kind == RELU:
            relu_back_row(dy, x, dx)
        elif kind == GELU:
            gelu_back_row(dy, x, dx)
        elif kind == SILU:
            silu_back_row(dy, x, dx)
        else:
            swiglu_back_row(dy, x[:width], x[width:], dx[:width], dx[width:])
        if into_b_D.size:
            add_row(into_b_D, dx)


def activate(pool: Pool, kind: Activation, x: Floats) -> Floats:
    """See `Backend.activate`."""
    x4 = wide(pool, x)
    if kind == "swiglu":
        rows = x4.reshape(-1, x.shape[-1])
        y = pool.empty((*x.shape[:-1], x.shape[-1] // 2))
        activate_rows(CODES[kind], rows, NOTHING, y.reshape(rows.shape[0], -1))
    else:
        y = pool.empty(x.shape)
        activate_rows(CODES[kind], x4.reshape(1, -1), NOTHING, y.reshape(1, -1))
    return narrow(pool, y, x.dtype)


def activate_backward(pool: Pool, kind: Activation, dy: Floats, x: Floats) -> Floats:
    """See `Backend.activate_backward`."""
    rows = math.prod(x.shape[:-1]) if kind == "swiglu" else 1
    x4, dy4, dx = wide(pool, x), wide(pool, dy), pool.empty(x.shape)
    activate_rows_backward(CODES[kind], dy4.reshape(rows, -1), x4.reshape(rows, -1), dx.reshape(rows, -1), NOTHING, True)
    return narrow(pool, dx, dy.dtype)
