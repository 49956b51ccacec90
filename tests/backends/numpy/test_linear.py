"""Products."""

from __future__ import annotations

import numpy as np
import pytest

from dcnr.backends.base import Activation
from dcnr.backends.numpy.backend import NumpyBackend

backend = NumpyBackend()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kind", ["relu", "gelu", "silu", "swiglu"])
def test_a_merged_activation_changes_no_bit(kind: Activation, dtype: type[np.floating]) -> None:
    """linear + activate, and their backwards, one after the other."""
    rng = np.random.default_rng(1)
    x, w, b = (rng.normal(size=shape).astype(dtype) for shape in ((7, 33), (34, 33), (34,)))
    y, pre = backend.linear(x, w, b, kind)
    plain, none = backend.linear(x, w, b)
    assert none is None
    np.testing.assert_array_equal(pre, plain)
    np.testing.assert_array_equal(y, backend.activate(kind, plain))

    dy = rng.normal(size=y.shape).astype(dtype)
    merged, apart = [(np.empty((34, 33), np.float32), np.empty(34, np.float32)) for _ in range(2)]
    dx = backend.linear_backward(dy, x, w, None, pre, kind, *merged, False, True)
    d = backend.activate_backward(kind, dy, plain)
    np.testing.assert_array_equal(dx, backend.linear_backward(d, x, w, None, None, None, *apart, False, True))
    for one, other in zip(merged, apart, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_gradient_nobody_wants_is_not_made() -> None:
    """`need_dx` False."""
    into = np.empty((2, 3), np.float32)
    dy, x, w = np.ones((5, 2), np.float32), np.ones((5, 3), np.float32), np.ones((2, 3), np.float32)
    assert backend.linear_backward(dy, x, w, None, None, None, into, None, False, False) is None
    np.testing.assert_array_equal(into, np.full((2, 3), 5))


def test_weight_gradients_of_float16_are_float32() -> None:
    """Sums beyond 65504 do not overflow."""
    into = np.empty((1, 1), np.float32)
    dy, x, w = np.full((200, 1), 100, np.float16), np.full((200, 1), 100, np.float16), np.ones((1, 1), np.float16)
    dx = backend.linear_backward(dy, x, w, None, None, None, into, None, False, True)
    assert into[0, 0] == 2e6
    assert dx is not None
    assert dx.dtype == np.float16
