"""Layer normalisation, alone and of a residual sum."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest

from dcnr.backends.base import HostArray, Philox
from dcnr.backends.cupy import norm
from dcnr.backends.cupy.array import DeviceArray, Dtype
from dcnr.backends.dtypes import precision_of
from dcnr.backends.load import load_backend
from tests.backends.cupy.emulator.device import EmulatedDevice, get, put
from tests.tolerances import assert_close

NUMPY = load_backend("numpy")
FLOAT32, FLOAT16, BFLOAT16 = STORED = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
EPS, RATE, SEED = 1e-5, 0.3, 0x123456789ABCDEF
WIDTHS = (1, 7, 8, 127, 513, 1040, 4104)
"""Beside those of every dtype: parts of a warp, one by one, several warps, more than a warp holds backward, than a block of 128 does."""


def draw(*shape: int, dtype: Dtype = FLOAT32, seed: int = 0) -> HostArray:
    """Normal numbers that depend on the shape and the seed alone."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def both(device: EmulatedDevice, offset: int = 0) -> tuple[Philox, Philox]:
    """One generator, as the device and as NumPy take it."""
    return Philox(SEED, 3, put(device, np.array(77, np.uint32)), offset), Philox(SEED, 3, 77, offset)


def gradients(width: int) -> tuple[HostArray, HostArray, HostArray]:
    """Accumulators that already hold something."""
    return draw(width, seed=90), draw(width, seed=91), draw(width, seed=92)


def put_gradients(device: EmulatedDevice, width: int) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    """The same on the device."""
    first, second, third = (put(device, array) for array in gradients(width))
    return first, second, third


def compare(actual: Sequence[DeviceArray], wanted: Sequence[HostArray], dtype: Dtype) -> None:
    """One by one."""
    for index, (a, w) in enumerate(zip(actual, wanted, strict=True)):
        assert a.dtype == w.dtype
        assert_close(get(a), w, precision_of(dtype), f"result {index}")


@pytest.mark.parametrize(
    ("dtype", "width"), [*((dtype, width) for dtype in STORED for width in (33, 264, 512)), *((FLOAT16, width) for width in WIDTHS)]
)
def test_layernorm(width: int, dtype: Dtype) -> None:
    """Both ways, of rows that lie far from zero; gradients written, then added."""
    device = EmulatedDevice()
    rows = 19
    x, dy = draw(rows, width, dtype=dtype) + dtype.type(3), draw(rows, width, dtype=dtype, seed=1)
    g, b = draw(width, dtype=dtype, seed=2), draw(width, dtype=dtype, seed=3)
    x_, dy_, g_, b_ = (put(device, array) for array in (x, dy, g, b))
    y, mean, rstd = norm.layernorm(device, x_, g_, b_, EPS)
    into, into_ = gradients(width)[:2], put_gradients(device, width)[:2]
    wanted = NUMPY.layernorm(x, g, b, EPS)
    compare([y, mean, rstd], wanted, dtype)
    for accumulate in (False, True):
        dx = norm.layernorm_backward(device, dy_, x_, g_, mean, rstd, *into_, accumulate)
        wanted_dx = NUMPY.layernorm_backward(dy, x, g, get(mean), get(rstd), *into, accumulate)
    compare([dx, *into_], [wanted_dx, *into], dtype)


@pytest.mark.parametrize("offset", [0, 8, 3])
@pytest.mark.parametrize(
    ("dtype", "width"), [*((dtype, width) for dtype in STORED for width in (33, 264, 512)), (FLOAT16, 1040), (FLOAT16, 4104)]
)
def test_residual_norm(width: int, dtype: Dtype, offset: int) -> None:
    """Both ways with everything there is, the same mask as the definition's; few rows and more than blocks take at once."""
    device = EmulatedDevice(multiprocessors=1)
    ours, theirs = both(device, offset)
    x, residual, dy, dsum = (draw(19, width, dtype=dtype, seed=seed) for seed in range(4))
    bias, g, b = (draw(width, dtype=dtype, seed=seed) for seed in (4, 5, 6))
    x_, residual_, dy_, dsum_, bias_, g_, b_ = (put(device, array) for array in (x, residual, dy, dsum, bias, g, b))
    actual = norm.residual_norm(device, x_, bias_, residual_, RATE, ours, g_, b_, EPS)
    compare(actual, NUMPY.residual_norm(x, bias, residual, RATE, theirs, g, b, EPS), dtype)
    total, _, mean, rstd = actual
    into, into_ = gradients(width), put_gradients(device, width)
    back = norm.residual_norm_backward(device, dy_, dsum_, total, RATE, ours, g_, mean, rstd, *into_, True)
    wanted = NUMPY.residual_norm_backward(dy, dsum, get(total), RATE, theirs, g, get(mean), get(rstd), *into, True)
    compare([*back, *into_], [*wanted, *into], dtype)
    assert np.array_equal(get(back[0]) == 0, wanted[0] == 0), "another mask"


@pytest.mark.parametrize("missing", ["bias", "b", "rng", "dsum", "into_bias", "into_b", "rate"])
def test_what_may_be_missing(missing: str) -> None:
    """Each of them alone."""
    device = EmulatedDevice()
    ours, theirs = both(device)
    width, rate = 264, 0.0 if missing == "rate" else RATE
    x, residual, dy, dsum = (draw(9, width, dtype=FLOAT16, seed=seed) for seed in range(4))
    bias, g, b = (draw(width, dtype=FLOAT16, seed=seed) for seed in (4, 5, 6))

    def on_device(name: str, array: HostArray) -> DeviceArray | None:
        return None if name == missing else put(device, array)

    def on_host(name: str, array: HostArray) -> HostArray | None:
        return None if name == missing else array

    ours_, theirs_ = (None, None) if missing == "rng" else (ours, theirs)
    total, y, mean, rstd = norm.residual_norm(
        device, put(device, x), on_device("bias", bias), put(device, residual), rate, ours_, put(device, g), on_device("b", b), EPS
    )
    wanted = NUMPY.residual_norm(x, on_host("bias", bias), residual, rate, theirs_, g, on_host("b", b), EPS)
    compare([total, y, mean, rstd], wanted, FLOAT16)
    into, into_ = gradients(width), put_gradients(device, width)
    back = norm.residual_norm_backward(
        device, put(device, dy), on_device("dsum", dsum), total, rate, ours_, put(device, g), mean, rstd,
        None if missing == "into_bias" else into_[0], into_[1], None if missing == "into_b" else into_[2], False,
    )  # fmt: skip
    wanted_back = NUMPY.residual_norm_backward(
        dy, on_host("dsum", dsum), get(total), rate, theirs_, g, get(mean), get(rstd),
        on_host("into_bias", into[0]), into[1], on_host("into_b", into[2]), False,
    )  # fmt: skip
    compare([*back, *into_], [*wanted_back, *into], FLOAT16)


@pytest.mark.parametrize("dtypes", [(FLOAT32, FLOAT32, FLOAT32), (BFLOAT16, BFLOAT16, BFLOAT16), (FLOAT16, FLOAT32, BFLOAT16)], ids=str)
@pytest.mark.parametrize("width", [33, 264])
def test_parameters_of_another_dtype(width: int, dtypes: tuple[Dtype, Dtype, Dtype]) -> None:
    """Than the activations, and than each other."""
    device = EmulatedDevice()
    x, residual = (draw(9, width, dtype=FLOAT16, seed=seed) for seed in (0, 1))
    g, b, bias = (draw(width, dtype=dtype, seed=seed) for seed, dtype in enumerate(dtypes, 2))
    x_, residual_, g_, b_, bias_ = (put(device, array) for array in (x, residual, g, b, bias))
    actual = norm.residual_norm(device, x_, bias_, residual_, 0.0, None, g_, b_, EPS)
    compare(actual, NUMPY.residual_norm(x, bias, residual, 0.0, None, g, b, EPS), FLOAT16)
    into, into_ = gradients(width)[:2], put_gradients(device, width)[:2]
    dx = norm.layernorm_backward(device, residual_, x_, g_, actual[2], actual[3], *into_, False)
    compare([dx, *into_], [NUMPY.layernorm_backward(residual, x, g, get(actual[2]), get(actual[3]), *into, False), *into], FLOAT16)


def test_activations_of_several_dtypes() -> None:
    """The first decides."""
    device = EmulatedDevice()
    x, residual, dy, dsum, g = draw(5, 33, dtype=FLOAT16), draw(5, 33, seed=1), draw(5, 33, seed=2), draw(5, 33, dtype=FLOAT16), draw(33)
    x_, residual_, dy_, dsum_, g_ = (put(device, array) for array in (x, residual, dy, dsum, g))
    actual = norm.residual_norm(device, x_, None, residual_, 0.0, None, g_, None, EPS)
    compare(actual, NUMPY.residual_norm(x, None, residual, 0.0, None, g, None, EPS), FLOAT16)
    into, into_ = gradients(33), put_gradients(device, 33)
    back = norm.residual_norm_backward(device, dy_, dsum_, actual[0], 0.0, None, g_, actual[2], actual[3], *into_, False)
    compare(
        back, NUMPY.residual_norm_backward(dy, dsum, get(actual[0]), 0.0, None, g, get(actual[2]), get(actual[3]), *into, False), FLOAT32
    )
    compare(into_, into, FLOAT32)


def test_rows_from_anywhere() -> None:
    """Also beside a 16-byte boundary, and of arrays with more axes."""
    device = EmulatedDevice()
    x, g = draw(3, 5, 33, dtype=FLOAT16), draw(33, dtype=FLOAT16)
    y, mean, rstd = norm.layernorm(device, put(device, x)[1:], put(device, g), None, EPS)
    assert mean.shape == (2, 5)
    wanted = NUMPY.layernorm(x[1:].reshape(-1, 33), g, None, EPS)
    compare([y.reshape(-1, 33), mean.reshape(-1), rstd.reshape(-1)], wanted, FLOAT16)


def test_the_same_bits_in_any_order_of_threads() -> None:
    """Nothing depends on who comes first."""
    results = []
    for reverse in (False, True):
        device = EmulatedDevice(reverse=reverse)
        ours, _ = both(device)
        x, residual, dy, dsum = (put(device, draw(67, 512, dtype=FLOAT16, seed=seed)) for seed in range(4))
        bias, g, b = (put(device, draw(512, dtype=FLOAT16, seed=seed)) for seed in (4, 5, 6))
        forward = norm.residual_norm(device, x, bias, residual, RATE, ours, g, b, EPS)
        into = put_gradients(device, 512)
        back = norm.residual_norm_backward(device, dy, dsum, forward[0], RATE, ours, g, *forward[2:], *into, True)
        assert device.launched == ["norm.residual_norm", "norm.norm_backward", "columns.reduce_columns"]
        results.append([get(array).tobytes() for array in (*forward, *back, *into)])
    assert results[0] == results[1]


def test_nan_stays_in_its_row() -> None:
    """And fills it."""
    device = EmulatedDevice()
    x = draw(7, 33)
    x[3, 5] = np.nan
    y, mean, rstd = norm.layernorm(device, put(device, x), put(device, np.ones(33, np.float32)), None, EPS)
    wanted = [row == 3 for row in range(7)]
    assert np.isnan(get(y)).all(axis=1).tolist() == np.isnan(get(y)).any(axis=1).tolist() == wanted
    assert np.isnan(get(mean)).tolist() == np.isnan(get(rstd)).tolist() == wanted


def test_no_rows() -> None:
    """Nothing runs; gradients that are not accumulated become zero."""
    device = EmulatedDevice()
    x, g = put(device, draw(0, 33)), put(device, draw(33))
    y, mean, rstd = norm.layernorm(device, x, g, g, EPS)
    into = put_gradients(device, 33)
    norm.residual_norm_backward(device, y, None, x, RATE, both(device)[0], g, mean, rstd, *into, True)
    assert not device.launched
    assert all(np.array_equal(get(a), w) for a, w in zip(into, gradients(33), strict=True))
    norm.residual_norm_backward(device, y, None, x, RATE, both(device)[0], g, mean, rstd, *into, False)
    assert not any(get(a).any() for a in into)
