"""Layer normalisation (Ba et al. 2016), row by row. Shape suffixes: R rows, D width."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dcnr.backends.cpu.activation import NOTHING
from dcnr.backends.cpu.casts import narrow, wide
from dcnr.backends.cpu.functions import F4
from dcnr.backends.cpu.jit import inner, kernel
from dcnr.backends.cpu.linear import vector
from dcnr.backends.cpu.pool import Pool

Floats = npt.NDArray[Any]


@inner
def mean_of(x: Floats) -> np.float32:
    total = F4(0)
    for d in range(x.size):
        total += x[d]
    return total / F4(x.size)


@inner
def variance_of(x: Floats, mean: np.float32) -> np.float32:
    total = F4(0)
    for d in range(x.size):
        total += (x[d] - mean) * (x[d] - mean)
    return total / F4(x.size)


@inner
def scale_row(x: Floats, mean: np.float32, rstd: np.float32, g: Floats, b: Floats, y: Floats) -> None:
    if b.size:
        for d in range(x.size):
            y[d] = (x[d] - mean) * rstd * g[d] + b[d]
    else:
        for d in range(x.size):
            y[d] = (x[d] - mean) * rstd * g[d]


@kernel("void(f4[:,::1], f4[::1], f4[::1], f8, f4[:,::1], f4[::1], f4[::1])")
def layernorm_kernel(x_RD: Floats, g_D: Floats, b_D: Floats, eps: float, y_RD: Floats, mean_R: Floats, rstd_R: Floats) -> None:
    for r in range(x_RD.shape[0]):
        x = x_RD[r]
        mean = mean_of(x)
        rstd = F4(1) / np.sqrt(variance_of(x, mean) + F4(eps))
        mean_R[r] = mean
        rstd_R[r] = rstd
        scale_row(x, mean, rstd, g_D, b_D, y_RD[r])


@inner
def back_row(dy: Floats, x: Floats, g: Floats, mean: np.float32, rstd: np.float32, dx: Floats, dg: Floats, db: Floats) -> None:
    """dx = rstd * (t - mean(t) - h * mean(t * h)) with h = (x - mean) * rstd, t = dy * g."""
    sum_t = F4(0)
    sum_th = F4(0)
    for d in range(x.size):
        t = dy[d] * g[d]
        sum_t += t
        sum_th += t * ((x[d] - mean) * rstd)
    mean_t = sum_t / F4(x.size)
    mean_th = sum_th / F4(x.size)
    for d in range(x.size):
        h = (x[d] - mean) * rstd
        dx[d] = rstd * (dy[d] * g[d] - mean_t - h * mean_th)
        dg[d] += dy[d] * h
    if db.size:
        for d in range(x.size):
            db[d] += dy[d]


@kernel("void(f4[:,::1], f4[:,::1], f4[::1], f4[::1], f4[::1], f4[:,::1], f4[::1], f4[::1], b1)")
def layernorm_backward_kernel(
    dy_RD: Floats, x_RD: Floats, g_D: Floats, mean_R: Floats, rstd_R: Floats, dx_RD: Floats, dg_D: Floats, db_D: Floats, accumulate: bool
) -> None:
    if not accumulate:
        dg_D[:] = F4(0)
        db_D[:] = F4(0)
    for r in range(x_RD.shape[0]):
        back_row(dy_RD[r], x_RD[r], g_D, mean_R[r], rstd_R[r], dx_RD[r], dg_D, db_D)


def layernorm(pool: Pool, x: Floats, g_D: Floats, b_D: Floats | None, eps: float) -> tuple[Floats, Floats, Floats]:
    """See `Backend.layernorm`."""
    leading, width = x.shape[:-1], x.shape[-1]
    rows = math.prod(leading)
    y, mean_R, rstd_R = pool.empty(x.shape), pool.empty(leading), pool.empty(leading)
    layernorm_kernel(
        wide(pool, x).reshape(rows, width), wide(pool, g_D), vector(pool, b_D), eps,
        y.reshape(rows, width), mean_R.reshape(rows), rstd_R.reshape(rows),
    )  # fmt: skip
    return narrow(pool, y, x.dtype), mean_R, rstd_R


def layernorm_backward(
    pool: Pool, dy: Floats, x: Floats, g_D: Floats, mean_R: Floats, rstd_R: Floats, into_g: Floats, into_b: Floats | None, accumulate: bool
) -> Floats:
    """See `Backend.layernorm_backward`."""
    width = x.shape[-1]
    dx = pool.empty(x.shape)
    layernorm_backward_kernel(
        wide(pool, dy).reshape(-1, width),
        wide(pool, x).reshape(-1, width),
        wide(pool, g_D),
        mean_R.reshape(-1),
        rstd_R.reshape(-1),
        dx.reshape(-1, width),
        into_g,
        NOTHING if into_b is None else into_b,
        accumulate,
    )
    return narrow(pool, dx, dy.dtype)
