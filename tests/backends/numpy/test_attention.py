"""Softmax attention."""

from __future__ import annotations

import numpy as np
import pytest

from dcnr.backends.base import Rope
from dcnr.backends.numpy.backend import NumpyBackend

backend = NumpyBackend()


@pytest.mark.parametrize("rope", [None, Rope(100.0)])
@pytest.mark.parametrize("causal", [True, False])
def test_it_is_what_one_row_at_a_time_gives(causal: bool, rope: Rope | None) -> None:
    """The textbook's loop over batch, heads and queries, of qkv with its bias."""
    heads, width, length = 3, 4, 7
    qkv, bias = (np.random.default_rng(3).normal(size=(*leading, 3 * heads * width)) for leading in ((2, length), ()))
    o, _ = backend.attention(qkv, bias, heads, causal, rope)
    qkv = qkv + bias
    for b in range(2):
        for h in range(heads):
            q, k, v = (qkv[b : b + 1, :, (part * heads + h) * width : (part * heads + h + 1) * width] for part in range(3))
            if rope is not None:
                q, k = backend.rotate(q, rope), backend.rotate(k, rope)
            for t in range(length):
                seen = t + 1 if causal else length
                e = np.exp(k[0, :seen] @ q[0, t] / np.sqrt(width))
                np.testing.assert_allclose(o[b, t, h * width : (h + 1) * width], (e / e.sum()) @ v[0, :seen])


def test_large_scores_do_not_overflow() -> None:
    """exp(1000) would."""
    qkv = np.full((1, 7, 12), 100, np.float32)
    o, saved = backend.attention(qkv, None, 1, True, None)
    np.testing.assert_allclose(o, 100)
    assert np.isfinite(backend.attention_backward(o, o, None, saved, 1, True, None, None, False)).all()


@pytest.mark.parametrize("rope", [None, Rope(100.0)])
@pytest.mark.parametrize("pieces", [(7,), (1,) * 7, (3, 1, 1, 2)], ids=str)
def test_in_pieces_it_is_what_all_positions_at_once_give(pieces: tuple[int, ...], rope: Rope | None) -> None:
    """Whatever lies beyond the positions so far, in what is kept, is neither read nor written."""
    heads, width = 3, 4
    qkv, bias = (np.random.default_rng(3).normal(size=(*leading, 3 * heads * width)) for leading in ((2, 7), ()))
    whole, _ = backend.attention(qkv, bias, heads, True, rope)
    kept, first = np.full((2, 9, 2 * heads * width), np.nan), 0
    for length in pieces:
        o = backend.attention_cached(qkv[:, first : first + length], bias, heads, rope, kept, first)
        np.testing.assert_allclose(o, whole[:, first : first + length])
        first += length
        assert np.isnan(kept[:, first:]).all()
        assert np.isfinite(kept[:, :first]).all()
