"""Activations: alone, with the bias of the product before them, and with its gradient."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from dcnr.backends.base import Activation, HostArray
from dcnr.backends.cupy import activation
from dcnr.backends.cupy.array import Dtype
from dcnr.backends.dtypes import precision_of
from dcnr.backends.load import load_backend
from tests.backends.cupy.emulator.device import EmulatedDevice, get, put
from tests.tolerances import assert_close

NUMPY = load_backend("numpy")
FLOAT32, FLOAT16, BFLOAT16 = STORED = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
KINDS: tuple[Activation, ...] = ("relu", "gelu", "silu", "swiglu")
SHAPES = ((1, 1), (7, 33), (127, 8), (61, 24), (5, 4112))
"""One by one and in vectors; many rows to a block, rows that end inside of one, several tiles."""


def draw(*shape: int, dtype: Dtype = FLOAT32, seed: int = 0) -> HostArray:
    """Normal numbers that depend on the shape and the seed alone."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def inputs(kind: Activation, shape: tuple[int, ...], dtype: Dtype) -> tuple[HostArray, HostArray]:
    """x, three times as wide as normal, and dy."""
    wide = (*shape[:-1], 2 * shape[-1]) if kind == "swiglu" else shape
    return (3 * draw(*wide)).astype(dtype), draw(*shape, dtype=dtype, seed=1)


def biased(x: HostArray, bias: HostArray) -> HostArray:
    """What the formula sees: the sum before it is rounded."""
    return x.astype(np.float32) + bias.astype(np.float32)


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_alone(shape: tuple[int, int], kind: Activation, dtype: Dtype) -> None:
    """Both ways."""
    device = EmulatedDevice()
    x, dy = inputs(kind, shape, dtype)
    x_ = put(device, x)
    assert_close(get(activation.activate(device, kind, x_)), NUMPY.activate(kind, x), precision_of(dtype))
    actual = get(activation.activate_backward(device, kind, put(device, dy), x_))
    assert_close(actual, NUMPY.activate_backward(kind, dy, x), precision_of(dtype))


@pytest.mark.parametrize("dtypes", [(FLOAT16, FLOAT16), (FLOAT32, BFLOAT16), (BFLOAT16, FLOAT32)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_behind_a_product(shape: tuple[int, int], kind: Activation, dtypes: tuple[Dtype, Dtype]) -> None:
    """The bias joins on the way; its gradient is made in the same pass, written and then added."""
    device = EmulatedDevice(multiprocessors=1)
    x, dy = inputs(kind, shape, dtypes[0])
    precision = precision_of(dtypes[0])
    bias = draw(x.shape[-1], dtype=dtypes[1], seed=2)
    x_, dy_, bias_ = (put(device, array) for array in (x, dy, bias))
    wanted = NUMPY.activate(kind, biased(x, bias)).astype(dtypes[0])
    assert_close(get(activation.forward(device, kind, x_, bias_)), wanted, precision)
    into = put(device, draw(x.shape[-1], seed=3))
    activation.backward(device, kind, dy_, x_, bias_, into, False)
    dx = get(activation.backward(device, kind, dy_, x_, bias_, into, True))
    exact = NUMPY.activate_backward(kind, dy.astype(np.float32), biased(x, bias))
    assert_close(dx, exact.astype(dtypes[0]), precision)
    assert_close(get(into), 2 * exact.sum(axis=0), precision)


def test_every_half_precision_number() -> None:
    """The polynomials keep their promise wherever an input may lie; the rest is rounding."""
    device = EmulatedDevice()
    numbers = np.arange(2**16, dtype=np.uint16).view(np.float16)
    x = numbers[np.isfinite(numbers)]
    exact = x.astype(np.float64)
    cdf = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in exact])
    slope = cdf + exact * np.exp(-exact * exact / 2) / math.sqrt(2 * math.pi)
    x_ = put(device, x)
    y = get(activation.activate(device, "gelu", x_)).astype(np.float64)
    dx = get(activation.activate_backward(device, "gelu", put(device, np.ones_like(x)), x_)).astype(np.float64)
    rounding = 2.0**-11
    assert (np.abs(y - exact * cdf) <= 2e-6 + 1e-8 * np.abs(exact) + rounding * np.abs(exact * cdf)).all()
    assert (np.abs(dx - slope) <= 1.1e-5 + rounding * np.abs(slope)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_every_magnitude(kind: Activation) -> None:
    """From the smallest to the largest inputs, of both signs; no formula overflows where the result does not."""
    device = EmulatedDevice()
    x = np.concatenate([s * np.logspace(-30, 4, 4000, dtype=np.float32) for s in (1, -1)])
    ones = np.ones(x.size // 2 if kind == "swiglu" else x.size, np.float32)
    x_ = put(device, x)
    assert_close(get(activation.activate(device, kind, x_)), NUMPY.activate(kind, x), "float32")
    assert_close(get(activation.activate_backward(device, kind, put(device, ones), x_)), NUMPY.activate_backward(kind, ones, x), "float32")


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_gets_through(kind: Activation, dtype: Dtype) -> None:
    """Loss scaling finds overflows by it; a NaN that arrives stays one."""
    device = EmulatedDevice()
    x = draw(4, 64, dtype=dtype)
    x[1, 3], x[2, 40], x[3, 63], x[0, 60] = np.nan, np.inf, np.nan, -np.inf
    wanted = NUMPY.activate(kind, x)
    x_, dy = put(device, x), np.ones_like(wanted)
    assert np.array_equal(np.isfinite(get(activation.activate(device, kind, x_))), np.isfinite(wanted))
    actual = get(activation.activate_backward(device, kind, put(device, dy), x_))
    assert np.array_equal(np.isnan(actual), np.isnan(NUMPY.activate_backward(kind, dy, x)))
    nan, positive = put(device, np.full_like(dy, np.nan)), put(device, np.abs(draw(4, 64, dtype=dtype)))
    assert np.isnan(get(activation.activate_backward(device, kind, nan, positive))).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_in_any_order_of_threads(kind: Activation) -> None:
    """Nothing depends on who comes first; two launches each backward."""
    results = []
    for reverse in (False, True):
        device = EmulatedDevice(reverse=reverse, multiprocessors=1)
        x, dy = inputs(kind, (61, 24), FLOAT16)
        bias, into = put(device, draw(x.shape[-1], dtype=FLOAT16)), put(device, draw(x.shape[-1]))
        y = activation.forward(device, kind, put(device, x), bias)
        dx = activation.backward(device, kind, put(device, dy), put(device, x), bias, into, True)
        assert device.launched == ["activation.activate", "activation.activate_backward", "columns.reduce_columns"]
        results.append([get(array).tobytes() for array in (y, dx, into)])
    assert results[0] == results[1]


def test_a_gradient_of_another_dtype() -> None:
    """The result has its dtype."""
    device = EmulatedDevice()
    x, dy = draw(5, 16, dtype=FLOAT16), draw(5, 16, seed=1)
    actual = get(activation.activate_backward(device, "silu", put(device, dy), put(device, x)))
    assert actual.dtype == FLOAT32
    assert_close(actual, NUMPY.activate_backward("silu", dy, x), "float32")


def test_rows_from_anywhere() -> None:
    """Also beside a 16-byte boundary, and of arrays with more axes."""
    device = EmulatedDevice()
    x = draw(3, 5, 7, dtype=FLOAT16)
    assert_close(get(activation.activate(device, "silu", put(device, x)[1:])), NUMPY.activate("silu", x[1:]), "float16")


def test_no_rows() -> None:
    """Nothing runs; a gradient that is not accumulated becomes zero."""
    device = EmulatedDevice()
    x, bias, into = put(device, draw(0, 8)), put(device, draw(8)), put(device, draw(8))
    assert activation.forward(device, "gelu", x, bias).shape == (0, 8)
    activation.backward(device, "gelu", x, x, bias, into, False)
    assert device.launched == ["clear"]
    assert not get(into).any()
