"""Making, moving, joining and cutting arrays."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from dcnr.backends.base import Precision
from dcnr.backends.dtypes import dtype_of
from dcnr.backends.numpy.backend import NumpyBackend

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
backend = NumpyBackend()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_floats_arrive_rounded_and_copied(precision: Precision) -> None:
    """The caller's array stays its own."""
    x = np.array([0.1, 1e6], np.float32)
    y = backend.from_host(x, precision)
    assert y.dtype == dtype_of(precision)
    assert not np.shares_memory(x, y)
    np.testing.assert_array_equal(y, backend.cast(x, precision))
    assert backend.empty((2, 3), precision).dtype == backend.zeros((2, 3), precision).dtype == dtype_of(precision)
    assert not backend.zeros((2, 3), precision).any()


def test_ids_become_int64() -> None:
    """Whatever integers they were, and whatever precision was asked for."""
    assert backend.from_host(np.array([1, 2], np.uint16), "float16").dtype == np.int64


def test_a_cast_to_the_same_type_is_no_copy() -> None:
    """`cast` may be called everywhere."""
    x = np.ones(3, np.float16)
    assert backend.cast(x, "float16") is x
    assert backend.to_host(x) is x


def test_copy_into_rounds() -> None:
    """Into a lower precision."""
    into = np.zeros(2, np.float16)
    backend.copy_into(into, np.array([0.1, 1e9], np.float32))
    assert into.tolist() == [float(np.float16(0.1)), np.inf]


def test_split_is_the_reverse_of_concatenate() -> None:
    """Pieces are contiguous and own their memory."""
    x = np.arange(2 * 7 * 3, dtype=np.float32).reshape(2, 7, 3)
    pieces = backend.split(x, (1, 4, 2), -2)
    assert [piece.shape for piece in pieces] == [(2, 1, 3), (2, 4, 3), (2, 2, 3)]
    assert all(piece.flags.c_contiguous and not np.shares_memory(piece, x) for piece in pieces)
    np.testing.assert_array_equal(backend.concatenate(pieces, -2), x)


def test_sums_are_rounded_once() -> None:
    """In float16, 2048 + 1 + 1 is 2050 only if the sum is float32 in between."""
    terms = [np.array([value], np.float16) for value in (2048, 1, 1)]
    assert backend.add(terms).tolist() == [2050]
    assert backend.add(terms).dtype == np.float16


def test_memory_is_that_of_the_machine_and_of_this_process() -> None:
    """In bytes."""
    memory = backend.memory()
    assert 0 < memory.used < memory.total
    backend.synchronize()
