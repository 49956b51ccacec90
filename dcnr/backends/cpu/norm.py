"""Layer normalisation (Ba et al. 2016), row by row, alone or of a residual sum. Shape suffixes: R rows, D width, N = R * D.

The residual sum is made a few rows at a time, so that the norm finds it in the cache.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dcnr.backends.base import Philox, dropout_scale, dropout_threshold
from dcnr.backends.cpu.activation import NOTHING, add_row
from dcnr.backends.cpu.casts import LOW_NONE, low_kind, narrow, round_run, wide
from dcnr.backends.cpu.functions import F4
from dcnr.backends.cpu.jit import inner, kernel
from dcnr.backends.cpu.linear import vector
from dcnr.backends.cpu.pool import Pool
from dcnr.backends.cpu.random import KEY, TILE, Key, keep_all, key_of

Floats = npt.NDArray[Any]
CHUNK = 4096
"""Elements of the residual stream that are done at a time, so few that those of all arrays fit the L2 cache."""
NO_ROWS = np.empty((0, 0), np.float32)

Mask = tuple[Key, int, int, float]
"""Key, offset, threshold, scale of a dropout."""
MASK = f"Tuple(({KEY}, i8, i8, f8))"
NO_MASK: Mask = ((0, 0, 0, 0), 0, 0, 1.0)
"""Threshold 0 keeps everything."""


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


@inner
def normalise_row(x: Floats, g: Floats, b: Floats, eps: float, y: Floats, mean_1: Floats, rstd_1: Floats) -> None:
    mean = mean_of(x)
    rstd = F4(1) / np.sqrt(variance_of(x, mean) + F4(eps))
    mean_1[0] = mean
    rstd_1[0] = rstd
    scale_row(x, mean, rstd, g, b, y)


@kernel("void(f4[:,::1], f4[::1], f4[::1], f8, f4[:,::1], f4[::1], f4[::1])")
def layernorm_kernel(x_RD: Floats, g_D: Floats, b_D: Floats, eps: float, y_RD: Floats, mean_R: Floats, rstd_R: Floats) -> None:
    for r in range(x_RD.shape[0]):
        normalise_row(x_RD[r], g_D, b_D, eps, y_RD[r], mean_R[r : r + 1], rstd_R[r : r + 1])


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


@inner
def sum_row(x: Floats, y: Floats, total: Floats) -> None:
    for d in range(total.size):
        total[d] = x[d] + y[d]


@inner
def sum_rows(mask: Mask, words: Floats, branch: Floats, residual: Floats, total: Floats) -> None:
    """total = residual + dropout(branch)."""
    key, offset, threshold, scale = mask
    if threshold:
        keep_all(key, threshold, scale, offset, words, branch, residual, total)
    else:
        sum_row(branch, residual, total)


@kernel(f"void({MASK}, i8, f4[:,::1], f4[::1], f4[:,::1], f4[::1], f4[::1], f8, f4[:,::1], f4[:,::1], f4[::1], f4[::1])")
def residual_norm_kernel(
    mask: Mask, low: int, x_RD: Floats, bias_D: Floats, residual_RD: Floats, g_D: Floats, b_D: Floats, eps: float,
    sum_RD: Floats, y_RD: Floats, mean_R: Floats, rstd_R: Floats,
) -> None:  # fmt: skip
    """sum = residual + dropout(x + bias), rounded as `low` says; y = layernorm(sum)."""
    rows, width = x_RD.shape
    key, offset, threshold, scale = mask
    x_N, residual_N, sum_N = x_RD.reshape(-1), residual_RD.reshape(-1), sum_RD.reshape(-1)
    step = max(1, CHUNK // width)
    branch = np.empty(step * width, np.float32)
    words = np.empty(TILE // 4, np.uint64)
    for first in range(0, rows, step):
        last = min(rows, first + step)
        here = slice(first * width, last * width)
        if bias_D.size:
            for r in range(first, last):
                sum_row(x_RD[r], bias_D, branch[(r - first) * width : (r - first + 1) * width])
            biased = branch[: (last - first) * width]
        else:
            biased = x_N[here]
        sum_rows((key, offset + first * width, threshold, scale), words, biased, residual_N[here], sum_N[here])
        round_run(low, sum_N[here])
        for r in range(first, last):
            normalise_row(sum_RD[r], g_D, b_D, eps, y_RD[r], mean_R[r : r + 1], rstd_R[r : r + 1])


@kernel(f"void({MASK}, f4[:,::1], f4[:,::1], f4[:,::1], f4[::1], f4[::1], f4[::1], f4[:,::1], f4[:,::1], f4[::1], f4[::1], f4[::1], b1)")
def residual_norm_backward_kernel(
    mask: Mask, dy_RD: Floats, dsum_RD: Floats, sum_RD: Floats, g_D: Floats, mean_R: Floats, rstd_R: Floats,
    dx_RD: Floats, dresidual_RD: Floats, dbias_D: Floats, dg_D: Floats, db_D: Floats, accumulate: bool,
) -> None:  # fmt: skip
    """dresidual = dsum + layernorm'(dy), dx = dropout'(dresidual), dbias = its column sums. Without dropout dx is dresidual."""
    rows, width = dy_RD.shape
    key, offset, threshold, scale = mask
    dx_N, dresidual_N = dx_RD.reshape(-1), dresidual_RD.reshape(-1)
    step = max(1, CHUNK // width)
    words = np.empty(TILE // 4, np.uint64)
    nothing = np.empty(0, np.float32)
    if not accumulate:
        dbias_D[:] = F4(0)
        dg_D[:] = F4(0)
        db_D[:] = F4(0)
    for first in range(0, rows, step):
        last = min(rows, first + step)
        here = slice(first * width, last * width)
        for r in range(first, last):
            back_row(dy_RD[r], sum_RD[r], g_D, mean_R[r], rstd_R[r], dresidual_RD[r], dg_D, db_D)
        if dsum_RD.size:
            for r in range(first, last):
                add_row(dresidual_RD[r], dsum_RD[r])
        if threshold:
            keep_all(key, threshold, scale, offset + first * width, words, dresidual_N[here], nothing, dx_N[here])
        if dbias_D.size:
            for r in range(first, last):
                add_row(dbias_D, dx_RD[r])


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


def mask_of(rate: float, rng: Philox | None) -> Mask:
    """A dropout, or none, for a kernel."""
    if rng is None or not dropout_threshold(rate):
        return NO_MASK
    return key_of(rng), rng.offset, dropout_threshold(rate), dropout_scale(rate)


def residual_norm(
    pool: Pool, x: Floats, bias_D: Floats | None, residual: Floats, rate: float, rng: Philox | None,
    g_D: Floats, b_D: Floats | None, eps: float,
) -> tuple[Floats, Floats, Floats, Floats]:  # fmt: skip
    """See `Backend.residual_norm`."""
    leading, width = x.shape[:-1], x.shape[-1]
    rows = math.prod(leading)
    total, y, mean_R, rstd_R = pool.empty(x.shape), pool.empty(x.shape), pool.empty(leading), pool.empty(leading)
    residual_norm_kernel(
        mask_of(rate, rng), LOW_NONE if x.dtype.char == "f" else low_kind(x.dtype),
        wide(pool, x).reshape(rows, width), vector(pool, bias_D), wide(pool, residual).reshape(rows, width),
        wide(pool, g_D), vector(pool, b_D), eps,
        total.reshape(rows, width), y.reshape(rows, width), mean_R.reshape(rows), rstd_R.reshape(rows),
    )  # fmt: skip
    return narrow(pool, total, x.dtype), narrow(pool, y, x.dtype), mean_R, rstd_R


def residual_norm_backward(
    pool: Pool, dy: Floats, dsum: Floats | None, total: Floats, rate: float, rng: Philox | None,
    g_D: Floats, mean_R: Floats, rstd_R: Floats, into_bias: Floats | None, into_g: Floats, into_b: Floats | None, accumulate: bool,
) -> tuple[Floats, Floats]:  # fmt: skip
    """See `Backend.residual_norm_backward`. Where nothing is dropped, both results are one array."""
    width = dy.shape[-1]
    mask = mask_of(rate, rng)
    dresidual = pool.empty(dy.shape)
    dx = pool.empty(dy.shape) if mask != NO_MASK else dresidual
    residual_norm_backward_kernel(
        mask,
        wide(pool, dy).reshape(-1, width), NO_ROWS if dsum is None else wide(pool, dsum).reshape(-1, width),
        wide(pool, total).reshape(-1, width), wide(pool, g_D), mean_R.reshape(-1), rstd_R.reshape(-1),
        dx.reshape(-1, width), dresidual.reshape(-1, width),
        NOTHING if into_bias is None else into_bias, into_g, NOTHING if into_b is None else into_b, accumulate,
    )  # fmt: skip
    low = narrow(pool, dresidual, dy.dtype)
    return low if dx is dresidual else narrow(pool, dx, dy.dtype), low
