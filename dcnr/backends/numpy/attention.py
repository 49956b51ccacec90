"""Softmax attention, written out: scores, mask, softmax, weighted sum. The backward computes the probabilities again.

B batch rows, T positions, H heads, D head width, F = 3 * H * D, S the positions that are attended to.
"""

from __future__ import annotations

import math

import numpy as np

from dcnr.backends.base import HostArray, Rope
from dcnr.backends.numpy.embedding import rotate
from dcnr.backends.numpy.wide import like, quiet, wide


class AttentionOps:
    """Attention over all of q, of k, of v in the columns of one array."""

    @quiet
    def attention(self, qkv_BTF: HostArray, heads: int, causal: bool, rope: Rope | None) -> tuple[HostArray, tuple[HostArray, ...]]:
        """Nothing is saved."""
        q, k, v = _heads(wide(qkv_BTF), heads, rope)
        return like(_merged(_probabilities(q, k, causal) @ v), qkv_BTF), ()

    @quiet
    def attention_backward(
        self, do_BTD: HostArray, qkv_BTF: HostArray, o_BTD: HostArray, saved: tuple[HostArray, ...],
        heads: int, causal: bool, rope: Rope | None,
    ) -> HostArray:  # fmt: skip
        """Through the weighted sum, the softmax, the scores and the rotation."""
        q, k, v = _heads(wide(qkv_BTF), heads, rope)
        p_BHTS = _probabilities(q, k, causal)
        do_BHTD = _split(wide(do_BTD), heads)
        dp_BHTS = do_BHTD @ v.swapaxes(-1, -2)
        ds_BHTS = p_BHTS * (dp_BHTS - (dp_BHTS * p_BHTS).sum(axis=-1, keepdims=True)) / math.sqrt(q.shape[-1])
        dq, dk, dv = ds_BHTS @ k, ds_BHTS.swapaxes(-1, -2) @ q, p_BHTS.swapaxes(-1, -2) @ do_BHTD
        if rope is not None:
            dq, dk = rotate(dq, rope, backward=True), rotate(dk, rope, backward=True)
        return like(np.concatenate([_merged(dq), _merged(dk), _merged(dv)], axis=-1), do_BTD)


def _heads(qkv_BTF: HostArray, heads: int, rope: Rope | None) -> tuple[HostArray, HostArray, HostArray]:
    """q, k, v as [B, H, T, D], q and k rotated."""
    q, k, v = (_split(part, heads) for part in np.split(qkv_BTF, 3, axis=-1))
    if rope is not None:
        q, k = rotate(q, rope, backward=False), rotate(k, rope, backward=False)
    return q, k, v


def _probabilities(q_BHTD: HostArray, k_BHSD: HostArray, causal: bool) -> HostArray:
    scores_BHTS = q_BHTD @ k_BHSD.swapaxes(-1, -2) / math.sqrt(q_BHTD.shape[-1])
    if causal:
        scores_BHTS = np.where(np.tri(q_BHTD.shape[-2], dtype=bool), scores_BHTS, scores_BHTS.dtype.type(-np.inf))
    e_BHTS = np.exp(scores_BHTS - scores_BHTS.max(axis=-1, keepdims=True))
    return np.asarray(e_BHTS / e_BHTS.sum(axis=-1, keepdims=True))


def _split(x_BTF: HostArray, heads: int) -> HostArray:
    """[B, T, H * D] → [B, H, T, D]."""
    return x_BTF.reshape(*x_BTF.shape[:2], heads, -1).swapaxes(1, 2)


def _merged(x_BHTD: HostArray) -> HostArray:
    """[B, H, T, D] → [B, T, H * D]."""
    x_BTHD = x_BHTD.swapaxes(1, 2)
    return x_BTHD.reshape(*x_BTHD.shape[:2], -1)
