"""Casts, copies, joins, cuts, sums, masks and step-varying numbers, on the emulated device, against NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from dcnr.backends.base import HostArray
from dcnr.backends.cupy import arrays
from dcnr.backends.cupy.array import Dtype
from dcnr.backends.dtypes import precision_of
from dcnr.errors import InvariantError
from tests.backends.cupy.emulator.device import EmulatedDevice, get, put
from tests.tolerances import assert_close

STORED = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
SIZES = (1, 7, 33, 127, 2048, 2049)


@pytest.fixture
def device() -> EmulatedDevice:
    """A fresh one."""
    return EmulatedDevice()


def draw(*shape: int, dtype: Dtype = STORED[0], seed: int = 0) -> HostArray:
    """Normal numbers that depend on the shape and the seed alone."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("wanted", STORED, ids=str)
@pytest.mark.parametrize("given", STORED, ids=str)
def test_casts_round_once_to_nearest_even(device: EmulatedDevice, given: Dtype, wanted: Dtype, start: int) -> None:
    """Every pair of dtypes, from a 16-byte boundary and from beside it, at every size, with numbers that overflow and vanish."""
    for size in SIZES:
        x = draw(size + start, dtype=given)
        with np.errstate(over="ignore"):
            x[-1:] = 1e30
            x[:1] = 1e-9
            assert np.array_equal(get(arrays.cast(device, put(device, x)[start:], wanted)), x[start:].astype(np.float32).astype(wanted))


def test_a_cast_to_the_same_dtype_is_the_array_itself(device: EmulatedDevice) -> None:
    """Nothing is copied."""
    x = put(device, draw(3))
    assert arrays.cast(device, x, x.dtype) is x


@pytest.mark.parametrize("wanted", STORED, ids=str)
def test_ids_become_numbers(device: EmulatedDevice, wanted: Dtype) -> None:
    """int64, negative ones too."""
    ids = np.arange(-5, 300, dtype=np.int64)
    assert np.array_equal(get(arrays.cast(device, put(device, ids), wanted)), ids.astype(np.float32).astype(wanted))


def test_copies_go_into_place(device: EmulatedDevice) -> None:
    """With and without rounding, into a slice; what does not fit is a bug."""
    into = put(device, draw(4, 5))
    x = draw(2, 5, dtype=np.dtype(np.float16), seed=1)
    arrays.copy_into(device, into[1:3], put(device, x))
    wanted = draw(4, 5)
    wanted[1:3] = x
    assert np.array_equal(get(into), wanted)
    with pytest.raises(InvariantError, match="does not fit"):
        arrays.copy_into(device, into, put(device, x))


def test_what_comes_from_the_host(device: EmulatedDevice) -> None:
    """Integers become int64, float64 becomes float32, others keep their dtype or are rounded to the one asked for."""
    half = np.dtype(np.float16)
    for given, asked, wanted in [("i4", None, "i8"), ("u2", None, "i8"), ("f8", None, "f4"), ("f2", None, "f2"), ("f8", half, "f2")]:
        x = np.arange(6).reshape(2, 3).astype(given)
        y = arrays.from_host(device, x, asked)
        back = arrays.to_host(device, y)
        assert back.dtype == np.dtype(wanted)
        assert np.array_equal(back, x.astype(wanted))


CUTS = (
    ((2, 3, 8), 2, (3, 4, 1)),
    ((2, 7, 64), 2, (32, 16, 16)),
    ((5, 6), 0, (1, 0, 4)),
    ((3, 9, 2), 1, (4, 5)),
    ((4, 3072), -1, (1024, 2048)),
)


@pytest.mark.parametrize("dtype", [*STORED, np.dtype(np.int64)], ids=str)
@pytest.mark.parametrize(("shape", "axis", "sizes"), CUTS)
def test_cut_and_joined(device: EmulatedDevice, shape: tuple[int, ...], axis: int, sizes: tuple[int, ...], dtype: Dtype) -> None:
    """`split` gives NumPy's pieces, `concatenate` makes the array of them again, whatever the axis and the boundaries."""
    x = draw(*shape).astype(dtype)
    pieces = arrays.split(device, put(device, x), sizes, axis)
    for piece, wanted in zip(pieces, np.split(x, np.cumsum(sizes)[:-1], axis), strict=True):
        assert np.array_equal(get(piece), wanted)
    assert np.array_equal(get(arrays.concatenate(device, pieces, axis)), x)


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_terms_are_added_left_to_right_and_rounded_once(device: EmulatedDevice, count: int, dtype: Dtype) -> None:
    """The very bits of float32 sums, however many terms."""
    for size in SIZES:
        terms = [draw(size, dtype=dtype, seed=seed) for seed in range(count)]
        total = terms[0].astype(np.float32)
        for term in terms[1:]:
            total += term.astype(np.float32)
        assert np.array_equal(get(arrays.add(device, [put(device, term) for term in terms])), total.astype(dtype))


def test_terms_of_different_dtypes(device: EmulatedDevice) -> None:
    """The sum has the dtype of the first."""
    x, y = draw(33, dtype=np.dtype(np.float16)), draw(33, seed=1)
    assert np.array_equal(get(arrays.add(device, [put(device, x), put(device, y)])), (x.astype(np.float32) + y).astype(np.float16))


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_a_gradient_joins_another(device: EmulatedDevice, dtype: Dtype) -> None:
    """In float32, from any dtype."""
    for size in SIZES:
        into, x = put(device, draw(size)), draw(size, dtype=dtype, seed=1)
        arrays.add_into(device, into, put(device, x))
        assert np.array_equal(get(into), draw(size) + x.astype(np.float32))


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 33), (129, 8), (513, 127), (300, 520), (1000, 256), (0, 5)])
def test_columns_are_summed(device: EmulatedDevice, rows: int, columns: int, dtype: Dtype) -> None:
    """Written or added, the same bits every time."""
    x = put(device, draw(rows, columns, dtype=dtype))
    into = [put(device, draw(columns, seed=1)) for _ in range(3)]
    for array, accumulate in zip(into, (False, False, True), strict=True):
        arrays.column_sums(device, x, array, accumulate)
    sums = draw(rows, columns, dtype=dtype).astype(np.float64).sum(0)
    assert_close(get(into[0]), sums, "float32")
    assert np.array_equal(get(into[0]), get(into[1]))
    assert_close(get(into[2]), sums + draw(columns, seed=1), "float32")


@pytest.mark.parametrize("fill", [-1e30, -1e39])
@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7, 7), (2, 2, 5, 9), (2, 40, 16), (2, 3, 264)])
def test_what_lies_above_the_diagonal_is_filled(device: EmulatedDevice, shape: tuple[int, ...], dtype: Dtype, fill: float) -> None:
    """Rounded as storage does it: a number out of reach is infinite."""
    x = draw(*shape, dtype=dtype)
    with np.errstate(over="ignore"):
        wanted = np.where(np.tri(shape[-2], shape[-1], dtype=np.bool_), x, np.float32(fill).astype(dtype))
    assert np.array_equal(get(arrays.causal_mask(device, put(device, x), fill)), wanted)


def test_numbers_that_change_from_step_to_step(device: EmulatedDevice) -> None:
    """Ints are 32-bit unsigned, floats float32; more of them than one launch takes; nothing is uploaded and nobody waits."""
    values = [2**32 - 1, 0.1, *range(40)]
    scalars = [arrays.scalar(device, value) for value in values]
    assert [scalar.dtype.name for scalar in scalars[:3]] == ["uint32", "float32", "uint32"]
    assert [get(scalar).item() for scalar in scalars] == [2**32 - 1, np.float32(0.1), *range(40)]
    arrays.set_scalars(device, scalars, [7, 2.5, *range(1, 41)])
    assert [get(scalar).item() for scalar in scalars] == [7, 2.5, *range(1, 41)]
    assert (device.uploads, device.waits) == (0, 0)


def test_empty_arrays_launch_nothing(device: EmulatedDevice) -> None:
    """No operation stumbles over them."""
    x = device.empty((0, 4), STORED[1])
    arrays.cast(device, x, STORED[0])
    arrays.add(device, [x, x])
    arrays.causal_mask(device, x, 0.0)
    arrays.split(device, x, [2, 2], 1)
    arrays.concatenate(device, [x, x], 1)
    arrays.add_into(device, device.empty((0,), STORED[0]), device.empty((0,), STORED[0]))
    assert [what for what in device.launched if what != "copy"] == []


def test_dtypes_have_names() -> None:
    """The three that this backend stores."""
    assert [precision_of(dtype) for dtype in STORED] == ["float32", "float16", "bfloat16"]
