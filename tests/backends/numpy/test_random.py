"""Philox."""

from __future__ import annotations

import numpy as np
import pytest

from dcnr.backends.base import Philox, dropout_scale, dropout_threshold
from dcnr.backends.numpy.random import halves, keep_mask, philox4x32

ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], wanted: tuple[int, ...]) -> None:
    """The vectors that Random123 publishes for philox4x32-10."""
    c0, c1, c2, c3 = (np.array([word], np.uint32) for word in counter)
    assert tuple(int(word[0]) for word in philox4x32((c0, c1, c2, c3), key)) == wanted


def test_each_element_has_the_half_word_that_the_contract_gives_it() -> None:
    """Element by element, as `base.Philox` says; also far into a large batch, where counters exceed 32 bits."""
    rng = Philox(seed=0x0123456789ABCDEF, stream=0xCAFE, step=9, offset=(1 << 35) - 70)
    found = halves(rng, 200)
    for index in (0, 1, 2, 5, 6, 7, 8, 15, 63, 69, 70, 71, 133, 199):
        e = rng.offset + index
        c = e >> 3
        c0, c1, c2, c3 = (np.array([word], np.uint32) for word in (c & ONES, c >> 32, rng.stream, rng.step))
        block = philox4x32((c0, c1, c2, c3), (rng.seed & ONES, rng.seed >> 32))
        word, half = (e & 7) >> 1, e & 1
        assert found[index] == (int(block[word][0]) >> (16 * half)) & 0xFFFF


def test_a_piece_of_a_mask_is_the_mask_of_the_piece() -> None:
    """Any offset and length."""
    whole = halves(Philox(1, 2, 3, 0), 1000)
    for offset, count in ((0, 1), (7, 33), (63, 2), (64, 64), (127, 127), (999, 1)):
        np.testing.assert_array_equal(halves(Philox(1, 2, 3, offset), count), whole[offset : offset + count])


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_the_share_that_stays(rate: float) -> None:
    """1 - rate; all of it at rate 0. What is kept is scaled so that the expectation stays."""
    kept = keep_mask(np.zeros((400, 1000)), rate, Philox(1, 2, 3, 0))
    assert kept.shape == (400, 1000)
    assert abs(kept.mean() - (1 - rate)) < (0.004 if rate else 1e-12)
    assert dropout_scale(rate) * (2**16 - dropout_threshold(rate)) == pytest.approx(2**16, rel=1e-12)


def test_steps_streams_and_seeds_are_independent() -> None:
    """No mask resembles another."""
    base = Philox(1, 2, 3, 0)
    reference = keep_mask(np.zeros(100_000), 0.5, base)
    for other in (base._replace(seed=2), base._replace(seed=1 + (1 << 32)), base._replace(stream=3), base._replace(step=4)):
        assert abs((keep_mask(np.zeros(100_000), 0.5, other) == reference).mean() - 0.5) < 0.01
