"""Costs and the fused LM head. Shape suffixes: R rows (tokens), V vocabulary, D width.

The loss of a row is float32 (exact up to there as the backend promises no more), the sum over rows float64, in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dcnr.backends.base import Scalar
from dcnr.backends.cpu.activation import add_bias, column_sums
from dcnr.backends.cpu.casts import narrow, wide
from dcnr.backends.cpu.embedding import flat_ids
from dcnr.backends.cpu.functions import F4, exp, largest
from dcnr.backends.cpu.jit import inner, kernel
from dcnr.backends.cpu.linear import product_into
from dcnr.backends.cpu.pool import Pool

Array = npt.NDArray[Any]
ANY_NEGATIVE = -(2**63)
TILE_ELEMENTS = 4 << 20
"""Logits per tile of the fused LM head (16 MiB): few enough for the L3 cache, so many that dw is seldom summed over tiles."""


@inner
def exponentials(x: Array, top: np.float32, y: Array) -> np.float32:
    """y = e**(x - top); returns their sum. Two loops, since a vectorised body must not carry the sum through exp."""
    for j in range(x.size):
        y[j] = exp(x[j] - top)
    total = F4(0)
    for j in range(y.size):
        total += y[j]
    return total


@inner
def scale_row(y: Array, factor: np.float32) -> None:
    for j in range(y.size):
        y[j] *= factor


@kernel("f8(f4[:,::1], i8[::1], f8, f4[:,::1])")
def cross_entropy_kernel(x_RV: Array, targets_R: Array, scale: float, d_RV: Array) -> float:
    """d = scale * (softmax(x) - one_hot); returns the sum of the losses. d may be x."""
    loss = np.float64(0)
    for r in range(targets_R.size):
        target = targets_R[r]
        if target < 0:
            d_RV[r, :] = F4(0)
            continue
        top = largest(x_RV[r])
        own = x_RV[r, target]
        total = exponentials(x_RV[r], top, d_RV[r])
        loss += np.float64(np.log(total) + (top - own))
        scale_row(d_RV[r], F4(scale) / total)
        d_RV[r, target] -= F4(scale)
    return loss


@kernel("f8(f4[:,::1], i8[::1], f8, f4[:,::1])")
def probability_kernel(p_RV: Array, targets_R: Array, scale: float, d_RV: Array) -> float:
    """d = -scale / p at the target, where p is above 1e-12; returns the sum of the losses."""
    loss = 0.0
    for r in range(targets_R.size):
        d_RV[r, :] = F4(0)
        target = targets_R[r]
        if target >= 0:
            p = p_RV[r, target]
            loss -= np.log(F4(1e-12) if p < F4(1e-12) else p)
            if not p < F4(1e-12):
                d_RV[r, target] = -F4(scale) / p
    return loss


@inner
def squared_error_row(x: Array, target: Array, factor: np.float32, d: Array) -> np.float32:
    total = F4(0)
    for j in range(x.size):
        e = x[j] - target[j]
        total += e * e
        d[j] = factor * e
    return total


@kernel("f8(f4[:,::1], f4[:,::1], f8, f4[:,::1])")
def squared_error_kernel(x_RV: Array, target_RV: Array, scale: float, d_RV: Array) -> float:
    loss = np.float64(0)
    features = x_RV.shape[1]
    for r in range(x_RV.shape[0]):
        loss += np.float64(squared_error_row(x_RV[r], target_RV[r], F4(2.0 * scale / features), d_RV[r]) / F4(features))
    return loss


@kernel("f8(f4[:,::1], i8[::1], f8, f4[:,::1])")
def squared_error_of_ids_kernel(x_RV: Array, targets_R: Array, scale: float, d_RV: Array) -> float:
    loss = np.float64(0)
    features = x_RV.shape[1]
    one_hot = np.zeros(features, np.float32)
    for r in range(x_RV.shape[0]):
        target = targets_R[r]
        if target < 0:
            d_RV[r, :] = F4(0)
            continue
        one_hot[target] = F4(1)
        loss += np.float64(squared_error_row(x_RV[r], one_hot, F4(2.0 * scale / features), d_RV[r]) / F4(features))
        one_hot[target] = F4(0)
    return loss


def cross_entropy(pool: Pool, logits: Array, targets: Array, weight: Scalar, grad_scale: Scalar) -> tuple[Scalar, Array]:
    """See `Backend.cross_entropy`."""
    vocabulary = logits.shape[-1]
    d = pool.empty(logits.shape)
    ids = flat_ids(targets, vocabulary, ANY_NEGATIVE)
    loss = cross_entropy_kernel(wide(pool, logits).reshape(-1, vocabulary), ids, grad_scale * weight, d.reshape(-1, vocabulary))
    return weight * loss, narrow(pool, d, logits.dtype)


def cross_entropy_of_probabilities(pool: Pool, p: Array, targets: Array, weight: Scalar, grad_scale: Scalar) -> tuple[Scalar, Array]:
    """See `Backend.cross_entropy_of_probabilities`."""
    vocabulary = p.shape[-1]
    d = pool.empty(p.shape)
    ids = flat_ids(targets, vocabulary, ANY_NEGATIVE)
    loss = probability_kernel(wide(pool, p).reshape(-1, vocabulary), ids, grad_scale * weight, d.reshape(-1, vocabulary))
    return weight * loss, narrow(pool, d, p.dtype)


def mean_squared_error(pool: Pool, x: Array, target: Array, weight: Scalar, grad_scale: Scalar) -> tuple[Scalar, Array]:
    """See `Backend.mean_squared_error`."""
    features = x.shape[-1]
    d = pool.empty(x.shape)
    x_RV, d_RV = wide(pool, x).reshape(-1, features), d.reshape(-1, features)
    if target.dtype.kind in "iu":
        loss = squared_error_of_ids_kernel(x_RV, flat_ids(target, features, ANY_NEGATIVE), grad_scale * weight, d_RV)
    else:
        loss = squared_error_kernel(x_RV, wide(pool, target).reshape(-1, features), grad_scale * weight, d_RV)
    return weight * loss, narrow(pool, d, x.dtype)


def lm_head_cross_entropy(
    pool: Pool,
    x: Array,
    w_VD: Array,
    b_V: Array | None,
    targets: Array,
    weight: Scalar,
    grad_scale: Scalar,
    into_w: Array | None,
    into_b: Array | None,
    accumulate: bool,
) -> tuple[Scalar, Array | None]:
    """See `Backend.lm_head_cross_entropy`."""
    vocabulary, width = w_VD.shape
    x_RD, w4_VD = wide(pool, x).reshape(-1, width), wide(pool, w_VD)
    ids = flat_ids(targets, vocabulary, ANY_NEGATIVE)
    rows = x_RD.shape[0]
    tile = min(rows, max(64, TILE_ELEMENTS // vocabulary // 64 * 64))
    dx_RD = pool.empty(x_RD.shape) if into_w is not None else None
    logits_RV = pool.empty((tile, vocabulary))
    loss = 0.0
    for start in range(0, rows, tile):
        stop = min(rows, start + tile)
        d = logits_RV[: stop - start]
        np.matmul(x_RD[start:stop], w4_VD.T, out=d)
        if b_V is not None:
            add_bias(d, wide(pool, b_V))
        loss += cross_entropy_kernel(d, ids[start:stop], grad_scale * weight, d)
        if into_w is None or dx_RD is None:
            continue
        adding = accumulate or start > 0
        product_into(pool, d.T, x_RD[start:stop], into_w, adding)
        if into_b is not None:
            column_sums(d, into_b, adding)
        np.matmul(d, w4_VD, out=dx_RD[start:stop])
    return weight * loss, None if dx_RD is None else narrow(pool, dx_RD.reshape(x.shape), x.dtype)
