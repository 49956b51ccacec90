"""Softmax attention in odd sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dcnr.backends.base import Backend, Precision, Rope
from tests.backends.cpu.pair import CPU, SIZES, STORED, accumulators, draw, same


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("rope", [None, Rope(100.0)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "width"), [(1, 2), (3, 6), (5, 34)])
@pytest.mark.parametrize("positions", SIZES)
def test_forward_and_backward(positions: int, heads: int, width: int, causal: bool, rope: Rope | None, precision: Precision) -> None:
    """o, dqkv and the gradient of the bias, written and then added to. Also without a bias."""

    def operation(backend: Backend, put: Any) -> tuple[Any, ...]:
        columns = 3 * heads * width
        b, do = put(0.5 * draw(columns)), put(draw(2, positions, heads * width, seed=1))
        (into_b,) = accumulators(backend, (columns,))
        o, saved = backend.attention(put(draw(2, positions, columns)), b, heads, causal, rope)
        dqkv = backend.attention_backward(do, o, b, saved, heads, causal, rope, into_b, False)
        backend.attention_backward(do, o, b, saved, heads, causal, rope, into_b, True)
        bare, saved = backend.attention(put(draw(2, positions, columns)), None, heads, causal, rope)
        return o, dqkv, into_b, bare, backend.attention_backward(do, bare, None, saved, heads, causal, rope, None, False)

    same(operation, precision)


def test_an_odd_head_width_without_rope() -> None:
    """Only rotary embedding needs pairs."""
    same(lambda backend, put: (backend.attention(put(draw(3, 33, 3 * 7)), None, 1, True, None)[0],))


@pytest.mark.parametrize("positions", [7, 33, 64])
def test_the_future_is_not_seen(positions: int) -> None:
    """Even a NaN at the last position leaves the earlier ones alone, and reaches its own."""
    qkv = draw(1, positions, 3 * 8)
    clean = CPU.attention(CPU.from_host(qkv), None, 2, True, None)[0]
    qkv[0, -1, 8:16] = np.nan  # keys of the last position
    o = CPU.attention(CPU.from_host(qkv), None, 2, True, None)[0]
    np.testing.assert_array_equal(o[0, :-1], clean[0, :-1])
    assert np.isnan(o[0, -1]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_overflow_gets_through(bad: float) -> None:
    """An infinite score makes its row NaN, as the definition does."""
    qkv = draw(1, 33, 3 * 4)
    qkv[0, 5, 4] = bad
    o = CPU.attention(CPU.from_host(qkv), None, 1, False, None)[0]
    assert not np.isfinite(o).all()


def test_large_scores_do_not_overflow() -> None:
    """The largest score of a row is subtracted first."""
    same(lambda backend, put: (backend.attention(put(100 * draw(2, 33, 3 * 16)), None, 2, True, None)[0],))


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("rope", [None, Rope(100.0)])
@pytest.mark.parametrize(("heads", "width"), [(1, 2), (3, 6), (5, 34)])
@pytest.mark.parametrize("pieces", [(1, 1), (33, 1, 1), (7, 60, 1)], ids=str)
def test_in_pieces(pieces: tuple[int, ...], heads: int, width: int, rope: Rope | None, precision: Precision) -> None:
    """o of every piece, and what is kept of it, with a bias and without."""

    def operation(backend: Backend, put: Any) -> tuple[Any, ...]:
        found, b = [], put(0.5 * draw(3 * heads * width))
        for bias in (b, None):
            kept, first = put(np.zeros((2, sum(pieces) + 5, 2 * heads * width), np.float32)), 0
            for length in pieces:
                qkv = put(draw(2, length, 3 * heads * width, seed=first))
                found.append(backend.attention_cached(qkv, bias, heads, rope, kept, first))
                first += length
            found.append(kept)
        return tuple(found)

    same(operation, precision)
