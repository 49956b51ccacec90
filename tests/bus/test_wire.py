"""What comes out of a codec is as near to what went in as its table says, and nothing else is touched."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dcnr.bus.wire import BLOCK, CODECS, Codec, codec_for, decode, encode, size

FLOATS = tuple(map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16)))
F32 = FLOATS[0]


def there_and_back(codec: Codec, array: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    """Encoded, of the length that was promised, and decoded."""
    data = encode(codec, array)
    assert data.dtype == np.uint8
    assert len(data) == size(codec, array.dtype, array.size)
    return decode(codec, data, array.dtype, array.shape)


def test_only_what_gets_smaller_is_encoded() -> None:
    """Ids never; half precision not as half; unknown names and float64 not at all."""
    assert [codec_for("fp16", dtype) for dtype in FLOATS] == ["fp16", "raw", "raw"]
    assert [codec_for("int8", dtype) for dtype in FLOATS] == ["int8"] * 3
    for wanted in (*CODECS, "native", "zip"):
        for dtype in ("int64", "bool", "float64", "int8"):
            assert codec_for(wanted, np.dtype(dtype)) == "raw"
    assert all(codec_for("raw", dtype) == "raw" for dtype in FLOATS)


@pytest.mark.parametrize("dtype", [*FLOATS, np.dtype(np.int64), np.dtype(np.bool_)], ids=str)
def test_raw_keeps_every_bit(dtype: np.dtype[Any]) -> None:
    """Also of a view that is not contiguous."""
    array = (np.arange(24).reshape(4, 6).T[::2] % 7).astype(dtype)
    np.testing.assert_array_equal(there_and_back("raw", array), array)


@pytest.mark.parametrize("shape", [(), (1,), (63,), (64,), (65,), (0, 3), (3, 5, 43)])
def test_shapes_of_any_size_come_back(shape: tuple[int, ...]) -> None:
    """Whole blocks, a part of one, none."""
    array = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    for codec in CODECS:
        got = there_and_back(codec, array)
        assert (got.shape, got.dtype) == (shape, F32)
        np.testing.assert_allclose(got, array, rtol=0, atol=0.02)


@given(arrays.arrays(np.float32, st.integers(0, 200), elements=st.floats(-65504, 65504, width=32)))
def test_fp16_is_the_nearest_half(array: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    """By IEEE rounding."""
    np.testing.assert_array_equal(there_and_back("fp16", array), array.astype(np.float16).astype(np.float32))


def test_fp16_saturates_but_keeps_what_is_not_finite() -> None:
    """An overflow of the computation must be found; one of the wire must not look like it."""
    array = np.array([1e9, -1e9, 65520, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(there_and_back("fp16", array), [65504, -65504, 65504, np.inf, -np.inf, np.nan])


@given(arrays.arrays(np.float32, st.integers(1, 300), elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)))
def test_int8_errs_by_half_a_scale_at_most(array: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    """Block by block, whatever the other blocks hold; zero stays zero, the sign stays."""
    got = there_and_back("int8", array)
    for start in range(0, len(array), BLOCK):
        block, other = array[start : start + BLOCK].astype(np.float64), got[start : start + BLOCK].astype(np.float64)
        scale = np.abs(block).max() / 127
        assert np.abs(block - other).max() <= scale * (0.5 + 1e-4) + 1e-38
        assert (block * other >= 0).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_int8_is_exact_for_multiples_of_the_scale(dtype: np.dtype[Any]) -> None:
    """And rounds ties to even."""
    array = np.linspace(-127, 127, 255).astype(dtype)[np.arange(64) * 4 - 1]
    array[0] = 127
    np.testing.assert_array_equal(there_and_back("int8", array).astype(np.float32), array.astype(np.float32))
    ties = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5], np.float32)
    np.testing.assert_array_equal(there_and_back("int8", ties), [127, 0, 2, 2, 0, -2])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_int8_makes_a_block_with_a_value_that_is_not_finite_all_nan(bad: float) -> None:
    """And no other block."""
    array = np.ones(3 * BLOCK, np.float32)
    array[BLOCK + 3] = bad
    got = there_and_back("int8", array)
    assert np.isnan(got[BLOCK : 2 * BLOCK]).all()
    np.testing.assert_array_equal(got[:BLOCK], 1)
    np.testing.assert_array_equal(got[2 * BLOCK :], 1)


def test_int8_of_the_smallest_numbers_is_finite() -> None:
    """Gradients may be tiny."""
    array = np.full(BLOCK, 1e-40, np.float32)
    assert np.isfinite(there_and_back("int8", array)).all()
    assert np.isfinite(there_and_back("int8", np.zeros(BLOCK, np.float32))).all()


@pytest.mark.parametrize("codec", CODECS)
def test_the_same_values_give_the_same_bytes(codec: Codec) -> None:
    """A hop that is sent again has the same bits."""
    array = np.random.default_rng(2).standard_normal((7, 129)).astype(np.float32)
    assert encode(codec, array).tobytes() == encode(codec, array.copy()).tobytes()


def test_how_much_smaller() -> None:
    """A quarter and a bit, with a scale for each 64 values."""
    assert size("int8", F32, 6400) == 6400 + 400
    assert size("fp16", F32, 6400) == 12800
    assert math.isclose(size("int8", F32, 1 << 20) / size("raw", F32, 1 << 20), 0.265625)
