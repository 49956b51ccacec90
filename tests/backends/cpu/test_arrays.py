"""Sums, masks, joining and cutting."""

from __future__ import annotations

import numpy as np
import pytest

from dcnr.backends.base import Precision
from tests.backends.cpu.pair import CPU, SIZES, STORED, draw, same


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("terms", [1, 2, 3, 5])
@pytest.mark.parametrize("size", SIZES)
def test_add(size: int, terms: int, precision: Precision) -> None:
    """Any number of terms, rounded once."""
    same(lambda backend, put: (backend.add([put(draw(3, size, seed=seed)) for seed in range(terms)]),), precision)


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 33), (127, 33), (33, 33)])
def test_causal_mask(rows: int, columns: int, precision: Precision) -> None:
    """Square or not, any fill."""
    same(
        lambda backend, put: (backend.causal_mask(put(draw(2, rows, columns)), 0.5), backend.causal_mask(put(draw(rows, columns)), -1e9)),
        precision,
    )


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_concatenate_and_split(axis: int, precision: Precision) -> None:
    """Split undoes concatenate, in contiguous pieces."""
    sizes = [1, 7, 33]
    shape = [3, 4, 5]
    parts = []
    for size in sizes:
        shape[axis] = size
        parts.append(CPU.from_host(draw(*shape), precision))
    joined = CPU.concatenate(parts, axis)
    np.testing.assert_array_equal(joined, np.concatenate(parts, axis))
    for piece, part in zip(CPU.split(joined, sizes, axis), parts, strict=True):
        assert piece.flags.c_contiguous
        np.testing.assert_array_equal(piece, part)
