"""Random masks, bit-equal to the definition wherever an array starts."""

from __future__ import annotations

import numpy as np
import pytest

from dcnr.backends.base import Philox, Precision
from tests.backends.cpu.pair import CPU, NUMPY, SIZES, STORED, draw, same

SEED = 0x123456789ABCDEF


@pytest.mark.parametrize("offset", [0, 1, 7, 8, 9, 127, 128, 1000, 1024, 12345678901, 2**35 - 5])
@pytest.mark.parametrize("size", [*SIZES, 8, 128, 1023, 1024, 5000])
def test_masks_are_those_of_the_definition(size: int, offset: int) -> None:
    """Aligned or not, shorter and longer than a tile, and where the block counter passes 32 bits."""
    ones = np.ones(size, np.float32)
    rng = Philox(SEED, 0xDEADBEEF, 77, offset)
    np.testing.assert_array_equal(CPU.random_mask(ones, 0.37, rng), NUMPY.random_mask(ones, 0.37, rng))


def test_a_shard_draws_its_part_of_the_whole() -> None:
    """Cutting a batch into rows is invisible."""
    x = draw(9, 33)
    whole = CPU.dropout(x, 0.3, Philox(SEED, 5, 6, 0))
    parts = [CPU.dropout(x[a:b], 0.3, Philox(SEED, 5, 6, a * 33)) for a, b in ((0, 2), (2, 7), (7, 9))]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.99])
def test_dropout(rate: float, precision: Precision) -> None:
    """With and without a residual."""
    rng = Philox(SEED, 1, 2, 7)
    same(
        lambda backend, put: (
            backend.dropout(put(draw(7, 127)), rate, rng),
            backend.dropout(put(draw(7, 127)), rate, rng, put(draw(7, 127, seed=1))),
            backend.random_mask(put(draw(7, 127)), rate, rng),
        ),
        precision,
    )


def test_every_key_matters() -> None:
    """Seed (both halves), stream, step and offset each change the mask."""
    ones = np.ones(2000, np.float32)
    first = Philox(1, 2, 3, 0)
    keys = [first, *(first._replace(**other) for other in ({"seed": 1 + 2**32}, {"seed": 2}, {"stream": 3}, {"step": 4}, {"offset": 2048}))]
    assert len({CPU.random_mask(ones, 0.5, key).tobytes() for key in keys}) == len(keys)


def test_a_dropped_nan_is_gone_and_a_kept_one_stays() -> None:
    """As the definition has it."""
    x = np.full(1000, np.nan, np.float32)
    rng = Philox(SEED, 1, 2, 0)
    np.testing.assert_array_equal(CPU.dropout(x, 0.5, rng), NUMPY.dropout(x, 0.5, rng))
