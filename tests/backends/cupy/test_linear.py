"""Linear layers on the emulated device, against the numpy backend: every dtype, every activation, odd shapes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest

from dcnr.backends.base import Activation, HostArray, Precision
from dcnr.backends.cupy import linear
from dcnr.backends.cupy.array import DeviceArray
from dcnr.backends.dtypes import dtype_of
from dcnr.backends.numpy.backend import NumpyBackend
from tests.backends.cupy.emulator.device import EmulatedDevice, get, put
from tests.tolerances import assert_close

STORED: tuple[Precision, ...] = ("float32", "float16", "bfloat16")
KINDS: tuple[Activation | None, ...] = (None, *get_args(Activation))
NUMPY = NumpyBackend()


def draw(*shape: int, precision: Precision = "float32", seed: int = 0) -> HostArray:
    """Normal numbers that depend on the shape and the seed alone."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype_of(precision))


def draw_whole(*shape: int, precision: Precision = "float32", seed: int = 0) -> HostArray:
    """Small integers, whose products and sums are exact in every dtype: nothing is rounded to the other side of a kink."""
    return np.random.default_rng((seed, *shape)).integers(-2, 3, shape).astype(dtype_of(precision))


def run(
    device: EmulatedDevice, arrays: Sequence[HostArray | None], dy: HostArray, kind: Activation | None, accumulate: bool
) -> tuple[DeviceArray, DeviceArray, DeviceArray | None, DeviceArray | None]:
    """(y, dw, db, dx) of the layer with `arrays` = (x, w, b)."""
    x, w, b = [None if array is None else put(device, array) for array in arrays]
    assert x is not None
    assert w is not None
    y, pre = linear.linear(device, x, w, b, kind)
    into_w = put(device, draw(*w.shape, seed=8))
    into_b = None if b is None else put(device, draw(*b.shape, seed=9))
    dx = linear.linear_backward(device, put(device, dy), x, w, b, pre, kind, into_w, into_b, accumulate, True)
    return y, into_w, into_b, dx


def wanted(
    arrays: Sequence[HostArray | None], dy: HostArray, kind: Activation | None, accumulate: bool
) -> tuple[HostArray, HostArray, HostArray | None, HostArray | None]:
    """The same by the numpy backend, whose backward takes one leading axis."""
    x, w, b = arrays
    assert x is not None
    assert w is not None
    x_RI = x.reshape(-1, x.shape[-1])
    y_RO, pre_RO = NUMPY.linear(x_RI, w, b, kind)
    into_w, into_b = draw(*w.shape, seed=8), None if b is None else draw(*b.shape, seed=9)
    dx_RI = NUMPY.linear_backward(dy.reshape(-1, dy.shape[-1]), x_RI, w, b, pre_RO, kind, into_w, into_b, accumulate, True)
    assert dx_RI is not None
    return y_RO.reshape(dy.shape), into_w, into_b, dx_RI.reshape(x.shape)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("precision", STORED)
def test_forward_and_all_gradients(precision: Precision, kind: Activation | None, bias: bool) -> None:
    """Written and added, at widths that are multiples of 8 and at odd ones, with leading axes."""
    make = draw_whole if kind == "relu" else draw
    for shape, outputs in (((3, 8), 16), ((2, 5, 7), 6), ((33, 24), 130), ((1, 1), 2)):
        x, w = make(*shape, precision=precision), make(outputs, shape[-1], precision=precision, seed=1)
        b = make(outputs, precision=precision, seed=2) if bias else None
        dy = draw(*shape[:-1], outputs // 2 if kind == "swiglu" else outputs, precision=precision, seed=3)
        for accumulate in (False, True):
            actual = run(EmulatedDevice(), (x, w, b), dy, kind, accumulate)
            for what, a, n in zip(("y", "dw", "db", "dx"), actual, wanted((x, w, b), dy, kind, accumulate), strict=True):
                assert (a is None) == (n is None)
                if a is not None and n is not None:
                    assert a.dtype == n.dtype
                    assert_close(get(a), n, precision, f"{what} of {shape} -> {outputs}")


@pytest.mark.parametrize(("stored", "weights"), [pair for pair in itertools.product(STORED, STORED) if pair[0] != pair[1]])
@pytest.mark.parametrize("kind", [None, "gelu"], ids=str)
def test_weights_of_another_dtype(stored: Precision, weights: Precision, kind: Activation | None) -> None:
    """They meet in float32, and results have the dtype of the activations."""
    x, dy = draw(5, 16, precision=stored), draw(5, 24, precision=stored, seed=3)
    w, b = draw(24, 16, precision=weights, seed=1), draw(24, precision=weights, seed=2)
    for a, n in zip(run(EmulatedDevice(), (x, w, b), dy, kind, False), wanted((x, w, b), dy, kind, False), strict=True):
        assert a is not None
        assert n is not None
        assert a.dtype == n.dtype
        assert_close(get(a), n, stored)


def test_the_bias_costs_no_pass_of_its_own() -> None:
    """One product, and where an activation follows one kernel."""
    cases: list[tuple[Activation | None, list[str]]] = [(None, ["product"]), ("gelu", ["product", "activation.activate"])]
    for kind, launches in cases:
        device = EmulatedDevice()
        x, w, b = (put(device, draw(*shape)) for shape in ((4, 8), (16, 8), (16,)))
        linear.linear(device, x, w, b, kind)
        assert device.launched == launches


def test_dx_is_made_only_where_it_is_wanted() -> None:
    """One product instead of two."""
    device = EmulatedDevice()
    dy, x, w, into = (put(device, draw(*shape)) for shape in ((4, 16), (4, 8), (16, 8), (16, 8)))
    assert linear.linear_backward(device, dy, x, w, None, None, None, into, None, False, False) is None
    assert device.launched == ["product"]


@pytest.mark.parametrize("accumulate", [False, True])
def test_no_rows(accumulate: bool) -> None:
    """Nothing is multiplied; gradients are zero, or stay what they were."""
    x, w, b, dy = draw(0, 8), draw(16, 8), draw(16), draw(0, 16)
    kinds: tuple[Activation | None, ...] = (None, "gelu")
    for kind in kinds:
        y, into_w, into_b, dx = run(EmulatedDevice(), (x, w, b), dy, kind, accumulate)
        assert (y.shape, dx and dx.shape) == ((0, 16), (0, 8))
        assert into_b is not None
        assert np.array_equal(get(into_w), draw(16, 8, seed=8) * accumulate)
        assert np.array_equal(get(into_b), draw(16, seed=9) * accumulate)
