"""The last step of sums over rows."""

from __future__ import annotations

import numpy as np
import pytest

from dcnr.backends.base import HostArray
from dcnr.backends.cupy.columns import no_rows, reduce_columns
from tests.backends.cupy.emulator.device import EmulatedDevice, get, put
from tests.tolerances import assert_close


def draw(*shape: int, seed: int = 0) -> HostArray:
    """Normal numbers that depend on the shape and the seed alone."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("vectors", [1, 2, 3])
@pytest.mark.parametrize(("count", "width"), [(1, 1), (31, 7), (33, 33), (300, 127), (511, 64)])
def test_every_vector_gets_its_columns(count: int, width: int, vectors: int, accumulate: bool) -> None:
    """Few rows and many, vectors that end inside a block of columns, written or added."""
    part = draw(count, vectors * width)
    results = []
    for reverse in (False, True):
        device = EmulatedDevice(reverse=reverse)
        intos = [put(device, draw(width, seed=9)) for _ in range(vectors)]
        reduce_columns(device, put(device, part), intos, accumulate)
        assert device.launched == ["columns.reduce_columns"]
        results.append(np.stack([get(into) for into in intos]))
    wanted = part.astype(np.float64).sum(axis=0).reshape(vectors, width) + accumulate * draw(width, seed=9)
    assert_close(results[0], wanted, "float32")
    assert np.array_equal(results[0], results[1]), "depends on the order of blocks"


def test_nobody_asked_for_a_vector() -> None:
    """The others are as they would be."""
    device = EmulatedDevice()
    part, last = draw(40, 3 * 33), put(device, draw(33))
    first = put(device, draw(33))
    reduce_columns(device, put(device, part), (first, None, last), False)
    assert_close(get(first), part[:, :33].sum(axis=0), "float32")
    assert_close(get(last), part[:, 66:].sum(axis=0), "float32")


def test_the_sum_of_nothing() -> None:
    """Zero, or what was there."""
    device = EmulatedDevice()
    into = put(device, draw(5))
    no_rows(device, (None, into), True)
    assert np.array_equal(get(into), draw(5))
    no_rows(device, (None, into), False)
    assert not get(into).any()
