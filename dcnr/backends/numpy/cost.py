"""Costs: the loss as a number and its gradient at once. Legend: `dcnr.backends.base`."""

from __future__ import annotations

import numpy as np

from dcnr.backends.base import HostArray, Scalar, is_integer
from dcnr.backends.numpy.wide import like, quiet, wide, write

TILE = 512
"""Tokens whose logits exist at a time in `lm_head_cross_entropy`; a constant, because it decides the order of sums."""

SMALLEST_PROBABILITY = 1e-12


def cross_entropy(logits_RV: HostArray, targets_R: HostArray, factor: float) -> tuple[float, HostArray]:
    """(sum over rows of -log softmax[target], factor * dlogits), in the dtype of the logits."""
    rows = np.arange(len(targets_R))
    counted = targets_R >= 0
    picked = np.where(counted, targets_R, 0)
    shifted = logits_RV - logits_RV.max(axis=-1, keepdims=True)
    exps = np.exp(shifted)
    total = exps.sum(axis=-1, keepdims=True)
    losses = np.log(total[:, 0]) - shifted[rows, picked]
    grad = exps / total
    grad[rows, picked] -= 1
    return _sum(losses, counted), _only(grad * factor, counted)


def _sum(losses_R: HostArray, counted_R: HostArray) -> float:
    return float(losses_R[counted_R].sum(dtype=np.float64))


def _only(grad_RV: HostArray, counted_R: HostArray) -> HostArray:
    return np.where(counted_R[:, None], grad_RV, grad_RV.dtype.type(0))


class CostOps:
    """`weight` is in the loss and in the gradient, `grad_scale` in the gradient alone."""

    @quiet
    def cross_entropy(self, logits_RV: HostArray, targets_R: HostArray, weight: Scalar, grad_scale: Scalar) -> tuple[Scalar, HostArray]:
        """Of logits."""
        total, grad = cross_entropy(wide(logits_RV), targets_R, weight * grad_scale)
        return weight * total, like(grad, logits_RV)

    @quiet
    def cross_entropy_of_probabilities(
        self, p_RV: HostArray, targets_R: HostArray, weight: Scalar, grad_scale: Scalar
    ) -> tuple[Scalar, HostArray]:
        """-log max(p, 1e-12); below that the gradient is zero."""
        rows = np.arange(len(targets_R))
        counted = targets_R >= 0
        picked = np.where(counted, targets_R, 0)
        p_R = wide(p_RV)[rows, picked]
        bounded = np.maximum(p_R, SMALLEST_PROBABILITY)
        grad = np.zeros(p_RV.shape, p_R.dtype)
        grad[rows, picked] = np.where(p_R > SMALLEST_PROBABILITY, -(weight * grad_scale) / bounded, 0)
        return weight * _sum(-np.log(bounded), counted), like(_only(grad, counted), p_RV)

    @quiet
    def mean_squared_error(self, x: HostArray, target: HostArray, weight: Scalar, grad_scale: Scalar) -> tuple[Scalar, HostArray]:
        """Mean over features, sum over rows."""
        x_RV = wide(x).reshape(-1, x.shape[-1])
        counted = np.ones(len(x_RV), bool)
        if is_integer(target):
            ids = target.reshape(-1)
            counted = ids >= 0
            target_RV = (np.arange(x.shape[-1]) == ids[:, None]).astype(x_RV.dtype)
        else:
            target_RV = wide(target).reshape(x_RV.shape)
        difference = x_RV - target_RV
        grad = _only(difference * (2 * weight * grad_scale / x.shape[-1]), counted)
        return weight * _sum((difference * difference).mean(axis=-1), counted), like(grad, x).reshape(x.shape)

    @quiet
    def lm_head_cross_entropy(
        self, x_RD: HostArray, w_VD: HostArray, b_V: HostArray | None, targets_R: HostArray, weight: Scalar, grad_scale: Scalar,
        into_w: HostArray | None, into_b: HostArray | None, accumulate: bool,
    ) -> tuple[Scalar, HostArray | None]:  # fmt: skip
        """Logits of `TILE` tokens at a time."""
        w = wide(w_VD)
        total = 0.0
        dx_RD = np.empty_like(x_RD) if into_w is not None else None
        for start in range(0, len(x_RD), TILE):
            tile = slice(start, start + TILE)
            x = wide(x_RD[tile])
            logits = x @ w.T if b_V is None else x @ w.T + wide(b_V)
            part, grad = cross_entropy(logits, targets_R[tile], weight * grad_scale)
            total += part
            if into_w is None or dx_RD is None:
                continue
            dx_RD[tile] = grad @ w
            write(into_w, grad.T @ x, accumulate or start > 0)
            if into_b is not None:
                write(into_b, grad.sum(axis=0), accumulate or start > 0)
        return weight * total, dx_RD
