"""Products of every kind, dtype, shape and alignment, against NumPy; equal bits in two runs."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

from dcnr.backends.base import HostArray
from dcnr.backends.cupy import arrays
from dcnr.backends.cupy.array import DeviceArray, Dtype
from dcnr.backends.cupy.device import Product
from dcnr.backends.dtypes import precision_of
from dcnr.errors import InvariantError
from tests.tolerances import assert_close

if TYPE_CHECKING:
    from dcnr.backends.cupy.cuda import CudaDevice

pytestmark = pytest.mark.gpu

F4 = np.dtype(np.float32)
STORED = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
KINDS = [Product(a, b, accumulate) for a, b, accumulate in itertools.product((False, True), repeat=3)]
SHAPES = ((1, 1, 1), (7, 33, 127), (1, 512, 64), (512, 1, 33), (129, 8, 1), (513, 127, 511), (256, 1536, 512))
MOST_HOST_MICROSECONDS = 25.0


def draw(*shape: int, dtype: Dtype, seed: int) -> HostArray:
    """Normal numbers that depend on the shape and the seed alone."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def put(device: CudaDevice, x: HostArray, shift: int = 0) -> DeviceArray:
    """On the device, `shift` elements behind an aligned address."""
    room = device.empty((x.size + shift,), x.dtype)[shift:]
    device.upload(room, x)
    return room.reshape(*x.shape)


def wanted(kind: Product, a: HostArray, b: HostArray, before: HostArray, bias: HostArray | None) -> HostArray:
    """In float64."""
    left, right = a.astype(np.float64), b.astype(np.float64)
    total = (left.T if kind.transpose_a else left) @ (right.T if kind.transpose_b else right)
    return total + kind.accumulate * before.astype(np.float64) + (0 if bias is None else bias.astype(np.float64))


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_products_equal_numpy(device: CudaDevice, dtype: Dtype, wide: bool, bias: bool, shift: int) -> None:
    """Also from addresses with the least alignment, and into float32; bit for bit the same when asked again."""
    out_dtype = F4 if wide else dtype
    for kind, (m, n, k) in itertools.product(KINDS, SHAPES):
        a = draw(*((k, m) if kind.transpose_a else (m, k)), dtype=dtype, seed=1)
        b = draw(*((n, k) if kind.transpose_b else (k, n)), dtype=dtype, seed=2)
        before = draw(m, n, dtype=out_dtype, seed=3)
        row = draw(n, dtype=out_dtype, seed=4) if bias else None
        found = []
        for _ in range(2):
            out = put(device, before, shift)
            device.product(kind, put(device, a, shift), put(device, b, shift), out, None if row is None else put(device, row))
            found.append(arrays.to_host(device, out))
        assert np.array_equal(found[0], found[1], equal_nan=True)
        assert_close(found[0], wanted(kind, a, b, before, row), precision_of(out_dtype), f"{kind} {(m, n, k)}")


def test_float32_is_float32(device: CudaDevice) -> None:
    """TF32 would be a thousand times further off."""
    a, b = draw(512, 2048, dtype=F4, seed=1), draw(512, 2048, dtype=F4, seed=2)
    out = device.empty((512, 512), F4)
    device.product(Product(False, True), put(device, a), put(device, b), out)
    right = a.astype(np.float64) @ b.astype(np.float64).T
    error = np.abs(arrays.to_host(device, out) - right).max() / np.abs(right).max()
    assert error < 2e-6


def test_large_products_are_right_everywhere(device: CudaDevice) -> None:
    """65,536 rows into 32,768 columns pass 2**31 elements: the last row is checked."""
    half = np.dtype(np.float16)
    x, w = draw(65536, 64, dtype=half, seed=1), draw(32768, 64, dtype=half, seed=2)
    out = device.empty((65536, 32768), half)
    device.product(Product(False, True), put(device, x), put(device, w), out)
    assert_close(arrays.to_host(device, out[-1]), x[-1].astype(np.float64) @ w.astype(np.float64).T, "float16")


def test_what_does_not_match_is_a_bug(device: CudaDevice) -> None:
    """Shapes, dtypes, and sizes of zero, which callers take care of."""
    x, half = device.empty((4, 8), F4), device.empty((4, 8), np.dtype(np.float16))
    out = device.empty((4, 4), F4)
    with pytest.raises(InvariantError, match="no product"):
        device.product(Product(False, False), x, x, out)
    with pytest.raises(InvariantError, match="no product"):
        device.product(Product(False, True), x, half, out)
    with pytest.raises(InvariantError, match="no product"):
        device.product(Product(False, True), x[:0], x, out[:0])


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_costs_the_host_little(device: CudaDevice, bias: bool) -> None:
    """Once it is planned; the best of ten rounds."""
    half = np.dtype(np.float16)
    x, w, b, y = (device.empty(shape, half) for shape in ((64, 64), (64, 64), (64,), (64, 64)))
    rounds = []
    for _ in range(10):
        device.synchronize()
        began = time.perf_counter()
        for _ in range(200):
            device.product(Product(False, True), x, w, y, b if bias else None)
        rounds.append((time.perf_counter() - began) / 200 * 1e6)
    assert min(rounds) < MOST_HOST_MICROSECONDS, rounds
