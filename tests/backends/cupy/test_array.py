"""Device arrays as views: shapes, addresses and sizes, without any memory behind them."""

from __future__ import annotations

import numpy as np
import pytest

from dcnr.backends.cupy.array import DeviceArray

X = DeviceArray(1000, (4, 6, 2), np.dtype(np.float16), "owner")


def test_sizes() -> None:
    """Of an array and of a number."""
    assert (X.ndim, X.size, X.nbytes) == (3, 48, 96)
    number = DeviceArray(8, (), np.dtype(np.float32), None)
    assert (number.ndim, number.size, number.nbytes) == (0, 1, 4)


@pytest.mark.parametrize(("shape", "wanted"), [((48,), (48,)), ((4, -1), (4, 12)), ((-1, 3), (16, 3)), ((2, 2, 6, 2), (2, 2, 6, 2))])
def test_another_shape_of_the_same_memory(shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """One extent may be left to us."""
    y = X.reshape(*shape)
    assert (y.ptr, y.shape, y.dtype, y.owner) == (X.ptr, wanted, X.dtype, X.owner)


@pytest.mark.parametrize("shape", [(47,), (5, -1), (4, 6, 3)])
def test_shapes_of_another_size_are_errors(shape: tuple[int, ...]) -> None:
    """Both are in the message."""
    with pytest.raises(ValueError, match=r"\(4, 6, 2\)"):
        X.reshape(*shape)


def test_entries_of_the_first_axis() -> None:
    """One, several, none, counted from the end; the owner stays."""
    row = 24
    assert (X[2].ptr, X[2].shape) == (1000 + 2 * row, (6, 2))
    assert (X[-1].ptr, X[-1].shape) == (1000 + 3 * row, (6, 2))
    assert (X[1:3].ptr, X[1:3].shape) == (1000 + row, (2, 6, 2))
    assert (X[:-1].ptr, X[:-1].shape) == (1000, (3, 6, 2))
    assert X[3:1].shape == (0, 6, 2)
    assert X[1:].owner == "owner"
    with pytest.raises(ValueError, match="consecutive"):
        X[::2]
    with pytest.raises(IndexError):
        X[4]
