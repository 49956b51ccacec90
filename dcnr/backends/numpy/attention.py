"""Softmax attention, written out: scores, mask, softmax, weighted sum. The backward computes the probabilities again.

B batch rows, T positions, H heads, D head width, F = 3 * H * D, S the positions that are attended to.
"""

from __future__ import annotations

import math

import numpy as np

from dcnr.backends.base import HostArray, Rope
from dcnr.backends.numpy.embedding import rotate
from dcnr.backends.numpy.wide import like, quiet, wide, write


class AttentionOps:
    """Attention over all of q, of k, of v in the columns of one array."""

    @quiet
    def attention(
        self, qkv_BTF: HostArray, bias_F: HostArray | None, heads: int, causal: bool, rope: Rope | None
    ) -> tuple[HostArray, tuple[HostArray, ...]]:
        """Saves qkv as it came."""
        q, k, v = _heads(_biased(qkv_BTF, bias_F), heads, rope)
        return like(_merged(_probabilities(q, k, causal) @ v), qkv_BTF), (qkv_BTF,)

    @quiet
    def attention_cached(
        self, qkv_BTF: HostArray, bias_F: HostArray | None, heads: int, rope: Rope | None, into_BSE: HostArray, first: int
    ) -> HostArray:
        """Writes the new keys and values, and reads all of them as they are stored."""
        q, k, v = _heads(_biased(qkv_BTF, bias_F), heads, None if rope is None else rope._replace(first=first))
        seen = first + qkv_BTF.shape[1]
        into_BSE[:, first:seen] = np.concatenate([_merged(k), _merged(v)], axis=-1)
        keys, values = (_split(part, heads) for part in np.split(wide(into_BSE[:, :seen]), 2, axis=-1))
        return like(_merged(_probabilities(q, keys, True) @ values), qkv_BTF)

    @quiet
    def attention_backward(
        self, do_BTD: HostArray, o_BTD: HostArray, bias_F: HostArray | None, saved: tuple[HostArray, ...],
        heads: int, causal: bool, rope: Rope | None, into_bias: HostArray | None, accumulate: bool,
    ) -> HostArray:  # fmt: skip
        """Through the weighted sum, the softmax, the scores, the rotation and the bias."""
        q, k, v = _heads(_biased(saved[0], bias_F), heads, rope)
        p_BHTS = _probabilities(q, k, causal)
        do_BHTD = _split(wide(do_BTD), heads)
        dp_BHTS = do_BHTD @ v.swapaxes(-1, -2)
        ds_BHTS = p_BHTS * (dp_BHTS - (dp_BHTS * p_BHTS).sum(axis=-1, keepdims=True)) / math.sqrt(q.shape[-1])
        dq, dk, dv = ds_BHTS @ k, ds_BHTS.swapaxes(-1, -2) @ q, p_BHTS.swapaxes(-1, -2) @ do_BHTD
        if rope is not None:
            dq, dk = rotate(dq, rope, backward=True), rotate(dk, rope, backward=True)
        dqkv_BTF = np.concatenate([_merged(dq), _merged(dk), _merged(dv)], axis=-1)
        if into_bias is not None:
            write(into_bias, dqkv_BTF.sum(axis=(0, 1)), accumulate)
        return like(dqkv_BTF, do_BTD)


def _biased(qkv_BTF: HostArray, bias_F: HostArray | None) -> HostArray:
    return wide(qkv_BTF) if bias_F is None else wide(qkv_BTF) + wide(bias_F)


def _heads(qkv_BTF: HostArray, heads: int, rope: Rope | None) -> tuple[HostArray, HostArray, HostArray]:
    """q, k, v as [B, H, T, D], q and k rotated."""
    q, k, v = (_split(part, heads) for part in np.split(qkv_BTF, 3, axis=-1))
    if rope is not None:
        q, k = rotate(q, rope, backward=False), rotate(k, rope, backward=False)
    return q, k, v


def _probabilities(q_BHTD: HostArray, k_BHSD: HostArray, causal: bool) -> HostArray:
    """The queries are those of the last positions."""
    scores_BHTS = q_BHTD @ k_BHSD.swapaxes(-1, -2) / math.sqrt(q_BHTD.shape[-1])
    if causal:
        queries, keys = scores_BHTS.shape[-2:]
        seen_TS = np.tri(queries, keys, keys - queries, dtype=bool)
        scores_BHTS = np.where(seen_TS, scores_BHTS, scores_BHTS.dtype.type(-np.inf))
    e_BHTS = np.exp(scores_BHTS - scores_BHTS.max(axis=-1, keepdims=True))
    return np.asarray(e_BHTS / e_BHTS.sum(axis=-1, keepdims=True))


def _split(x_BTF: HostArray, heads: int) -> HostArray:
    """[B, T, H * D] → [B, H, T, D]."""
    return x_BTF.reshape(*x_BTF.shape[:2], heads, -1).swapaxes(1, 2)


def _merged(x_BHTD: HostArray) -> HostArray:
    """[B, H, T, D] → [B, T, H * D]."""
    x_BTHD = x_BHTD.swapaxes(1, 2)
    return x_BTHD.reshape(*x_BTHD.shape[:2], -1)
