"""Attention, both ways, by each of its three kinds of kernels, against the definition.

Every case runs with threads and blocks in order and again in the opposite order, and must not differ in one bit. What the kernels
write to is full of NaN before.
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

from dcnr.backends.base import HostArray, Rope
from dcnr.backends.cupy import attention
from dcnr.backends.cupy.array import Dtype
from dcnr.backends.dtypes import precision_of
from dcnr.backends.load import load_backend
from dcnr.errors import BackendUnavailable
from tests.backends.cupy.emulator.device import EmulatedDevice, get, put
from tests.tolerances import assert_close

NUMPY = load_backend("numpy")
FLOAT32, FLOAT16, BFLOAT16 = (np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
ROPE = Rope(10000.0)
LENGTHS = (1, 7, 33, 64, 65, 127, 128, 129)
HOPPER, MMA, SIMT = 90, 80, 70
"""The least capability that has them."""
WAYS = ((HOPPER, "attention_hopper"), (MMA, "attention_mma"), (SIMT, "attention_simt"))


class Case(NamedTuple):
    """What a call gets."""

    head_dim: int
    length: int
    dtype: Dtype = FLOAT16
    batch: int = 1
    heads: int = 1
    causal: bool = True
    rope: Rope | None = ROPE
    bias: Dtype | None = FLOAT16
    into: bool = True
    accumulate: bool = True

    @property
    def features(self) -> int:
        """Columns of qkv."""
        return 3 * self.heads * self.head_dim

    def inputs(self) -> tuple[HostArray, HostArray, HostArray | None, HostArray | None]:
        """qkv, do, the bias, what its gradient is added to."""
        rng = np.random.default_rng((self.head_dim, self.length, self.heads))
        qkv = rng.standard_normal((self.batch, self.length, self.features)).astype(self.dtype)
        do = rng.standard_normal((self.batch, self.length, self.features // 3)).astype(self.dtype)
        bias = None if self.bias is None else rng.standard_normal(self.features).astype(self.bias)
        return qkv, do, bias, rng.standard_normal(self.features).astype(np.float32) if self.into else None


def wanted(case: Case) -> list[HostArray]:
    """o, dqkv and the gradient of the bias, as the definition has them."""
    qkv, do, bias, into = case.inputs()
    o, saved = NUMPY.attention(qkv, bias, case.heads, case.causal, case.rope)
    dqkv = NUMPY.attention_backward(do, o, bias, saved, case.heads, case.causal, case.rope, into, case.accumulate)
    return [array for array in (o, dqkv, into) if array is not None]


def actual(device: EmulatedDevice, case: Case, fused: bool = True) -> list[HostArray]:
    """The same by kernels."""
    qkv, do, bias, into = case.inputs()
    bias_, into_ = (None if array is None else put(device, array) for array in (bias, into))
    o, saved = attention.attention(device, put(device, qkv), bias_, case.heads, case.causal, case.rope, fused)
    args = (put(device, do), o, bias_, saved, case.heads, case.causal, case.rope, into_, case.accumulate, fused)
    dqkv = attention.attention_backward(device, *args)
    return [get(array) for array in (o, dqkv, into_) if array is not None]


def check(capability: int, case: Case, source: str) -> None:
    """Equal to the definition, twice the same bits, by the kernels of `source`."""
    device = EmulatedDevice(capability)
    forward, backward = actual(device, case), actual(EmulatedDevice(capability, reverse=True), case)
    assert {name.split(".")[0] for name in device.launched} <= {source, "attention_rope", "columns"}
    assert f"{source}.attention_dkv" in device.launched
    for what, a, b, w in zip(("o", "dqkv", "gradient of the bias"), forward, backward, wanted(case), strict=False):
        assert a.tobytes() == b.tobytes(), f"{what} depends on the order of threads"
        assert a.dtype == w.dtype
        assert_close(a, w, precision_of(case.dtype), what)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_on_hopper(length: int, causal: bool) -> None:
    """Whole tiles, one row more, one row less, less than a tile."""
    check(HOPPER, Case(64, length, causal=causal, heads=1 + length % 3), "attention_hopper")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_with_mma(length: int, causal: bool) -> None:
    """The same for the portable tensor-core kernels."""
    check(MMA, Case(64, length, causal=causal, heads=1 + length % 3), "attention_mma")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_with_plain_kernels(length: int, causal: bool) -> None:
    """The same for the plain kernels, in float32."""
    check(SIMT, Case(64, length, FLOAT32, causal=causal, heads=1 + length % 3, bias=FLOAT32), "attention_simt")


@pytest.mark.parametrize(("dtype", "causal"), [(FLOAT16, True), (BFLOAT16, False)], ids=str)
@pytest.mark.parametrize(
    ("capability", "head_dim", "source"),
    [
        (HOPPER, 64, "attention_hopper"), (HOPPER, 128, "attention_hopper"), (HOPPER, 32, "attention_mma"), (HOPPER, 96, "attention_mma"),
        (MMA, 64, "attention_mma"), (MMA, 128, "attention_mma"), (SIMT, 64, "attention_simt"),
        (HOPPER, 8, "attention_simt"), (HOPPER, 40, "attention_simt"),
    ],
)  # fmt: skip
def test_every_head_dim(capability: int, head_dim: int, source: str, dtype: Dtype, causal: bool) -> None:
    """In both 16-bit dtypes, two sequences of two heads, with a part of a tile."""
    check(capability, Case(head_dim, 97, dtype, batch=2, heads=2, causal=causal, bias=dtype), source)


@pytest.mark.parametrize("head_dim", [1, 2, 7, 33, 36, 66, 160, 162, 256])
def test_plain_kernels_take_any_head_dim(head_dim: int) -> None:
    """Odd ones cannot be turned."""
    case = Case(head_dim, 37, FLOAT32, batch=2, heads=2, rope=None if head_dim % 2 else ROPE, bias=FLOAT32)
    check(HOPPER, case, "attention_simt")


@pytest.mark.parametrize(("capability", "source"), WAYS)
@pytest.mark.parametrize(
    "case",
    [
        Case(64, 70, batch=2, rope=None), Case(64, 70, batch=2, bias=None), Case(64, 70, batch=2, rope=None, bias=None),
        Case(64, 70, batch=2, into=False), Case(64, 70, batch=2, accumulate=False),
    ],
    ids=["rope", "bias", "both", "into", "accumulate"],
)  # fmt: skip
def test_what_may_be_missing(case: Case, capability: int, source: str) -> None:
    """Rotation, bias, somebody who wants its gradient, what is there of it."""
    check(capability, case, source)


@pytest.mark.parametrize(("capability", "source"), WAYS)
@pytest.mark.parametrize("bias", [FLOAT32, BFLOAT16], ids=str)
def test_the_bias_may_have_another_dtype(bias: Dtype, capability: int, source: str) -> None:
    """Parameters need not be stored as activations are."""
    check(capability, Case(64, 20, bias=bias), source)


def test_switched_off_the_plain_kernels_do_it() -> None:
    """Where faster ones are."""
    device = EmulatedDevice(HOPPER)
    case = Case(64, 33)
    for a, w in zip(actual(device, case, fused=False), wanted(case), strict=True):
        assert_close(a, w, "float16")
    assert not any("hopper" in name or "mma" in name for name in device.launched)


def test_angles_are_uploaded_once() -> None:
    """Later lengths up to the same power of two find them there: recorded work must not upload."""
    device = EmulatedDevice(SIMT)
    actual(device, Case(8, 70))
    before = device.uploads
    case = Case(8, 128)
    actual(device, case)
    given = sum(array is not None for array in case.inputs())
    assert device.uploads - before == given


def test_large_scores() -> None:
    """Rows that see one key alone, however large the scores: nothing overflows."""
    case = Case(64, 65, rope=None, bias=None)
    qkv = case.inputs()[0]
    qkv[..., :128] *= np.float16(30)
    o, _ = NUMPY.attention(qkv, None, 1, True, None)
    for capability in (HOPPER, MMA, SIMT):
        device = EmulatedDevice(capability)
        assert_close(get(attention.attention(device, put(device, qkv), None, 1, True, None)[0]), o, "float16")


def test_nothing_of_nothing() -> None:
    """No sequence: no launch, and a gradient of zero."""
    device = EmulatedDevice(HOPPER)
    o, dqkv, into = actual(device, Case(64, 5, batch=0, accumulate=False))
    assert o.shape == (0, 5, 64)
    assert dqkv.shape == (0, 5, 192)
    assert not into.any()


def test_too_wide_heads_are_refused() -> None:
    """With the number that is too large."""
    device = EmulatedDevice(HOPPER)
    with pytest.raises(BackendUnavailable, match="264"):
        actual(device, Case(264, 1))
