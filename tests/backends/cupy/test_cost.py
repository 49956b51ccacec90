"""Costs and the fused LM head, against the NumPy backend, with threads and blocks in either order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dcnr.backends.base import HostArray
from dcnr.backends.cupy import cost
from dcnr.backends.cupy.array import DeviceArray, Dtype
from dcnr.backends.dtypes import precision_of
from dcnr.backends.load import load_backend
from dcnr.errors import InvariantError
from tests.backends.cupy.dry import DryDevice
from tests.backends.cupy.emulator.device import EmulatedDevice, get, put
from tests.tolerances import assert_close

NUMPY = load_backend("numpy")
FLOAT32, FLOAT16, BFLOAT16 = STORED = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
WEIGHT, GRAD_SCALE = 0.25, 1024.0
WIDTHS = (1, 7, 33, 127, 128, 511, 513, 1032, 1033, 2048, 10_000)
WHOLE_WIDTHS = (16_384, 32_768, 65_536, 65_544)
"""Those for which rows are held by more threads, and one that no block holds."""

Result = tuple[DeviceArray, DeviceArray | None]


def logits(rows: int, width: int, dtype: Dtype) -> HostArray:
    """Normal numbers that depend on the shape alone."""
    return (3 * np.random.default_rng((rows, width)).standard_normal((rows, width))).astype(dtype)


def ids(rows: int, width: int) -> HostArray:
    """Targets, some of which count nothing."""
    targets = np.random.default_rng((rows, width, 1)).integers(0, width, rows)
    targets[1::4] = -1
    targets[2::5] = -100
    return targets


def factors(device: EmulatedDevice, weight: float = WEIGHT, grad_scale: float = GRAD_SCALE) -> tuple[DeviceArray, DeviceArray]:
    """As the backend's scalars."""
    return put(device, np.array(weight, np.float32)), put(device, np.array(grad_scale, np.float32))


def in_both_orders(work: Callable[[EmulatedDevice], Result]) -> tuple[HostArray, HostArray]:
    """What `work` gives, which must not depend on the order of threads, and waits for nothing."""
    results = []
    for reverse in (False, True):
        device = EmulatedDevice(reverse=reverse)
        loss, gradient = work(device)
        assert gradient is not None
        assert device.waits == 0
        results.append((get(loss), get(gradient)))
    (loss_, gradient_), (loss_again, gradient_again) = results
    assert loss_.tobytes() == loss_again.tobytes()
    assert gradient_.tobytes() == gradient_again.tobytes()
    return loss_, gradient_


def check(actual: tuple[HostArray, HostArray], wanted: tuple[Any, HostArray], dtype: Dtype) -> None:
    """A loss and a gradient; the loss is better than what is stored."""
    assert actual[0].shape == ()
    assert actual[0].dtype == np.float64
    assert actual[1].dtype == dtype
    assert_close(actual[0], wanted[0], "float32", "loss")
    assert_close(actual[1], wanted[1], precision_of(dtype), "gradient")


@pytest.mark.parametrize(
    ("dtype", "width"),
    [*((dtype, width) for dtype in STORED for width in (33, 264, 10_000)), *((FLOAT16, width) for width in (*WIDTHS, *WHOLE_WIDTHS))],
)
def test_cross_entropy(dtype: Dtype, width: int) -> None:
    """Rows in registers and rows that are read twice, wherever vectors of eight fit or not."""
    rows = 7 if width < 10_000 else 3
    x, targets = logits(rows, width, dtype), ids(rows, width)
    actual = in_both_orders(lambda device: cost.cross_entropy(device, put(device, x), put(device, targets), *factors(device)))
    check(actual, NUMPY.cross_entropy(x, targets, WEIGHT, GRAD_SCALE), dtype)


@pytest.mark.parametrize("width", [8, 33, 1037, 2048])
@pytest.mark.parametrize("dtype", STORED)
def test_rows_may_start_anywhere(dtype: Dtype, width: int) -> None:
    """An array that does not start at a 16-byte boundary."""
    raw, targets = logits(1, width * 5 + 1, dtype)[0], ids(5, width)

    def work(device: EmulatedDevice) -> Result:
        return cost.cross_entropy(device, put(device, raw)[1:].reshape(5, width), put(device, targets), *factors(device))

    check(in_both_orders(work), NUMPY.cross_entropy(raw[1:].reshape(5, width), targets, WEIGHT, GRAD_SCALE), dtype)


@pytest.mark.parametrize("width", [33, 1037, 2048])
@pytest.mark.parametrize("dtype", STORED)
def test_cross_entropy_of_probabilities(dtype: Dtype, width: int) -> None:
    """Also of a probability that is zero."""
    x, targets = np.abs(logits(7, width, dtype)), ids(7, width)
    x[0, targets[0]] = 0

    def work(device: EmulatedDevice) -> Result:
        return cost.cross_entropy_of_probabilities(device, put(device, x), put(device, targets), *factors(device))

    check(in_both_orders(work), NUMPY.cross_entropy_of_probabilities(x, targets, WEIGHT, GRAD_SCALE), dtype)


@pytest.mark.parametrize("target", [*STORED, np.dtype(np.int64)])
@pytest.mark.parametrize("shape", [(7, 1), (2, 3, 33), (5, 1037), (3, 2048)])
@pytest.mark.parametrize("dtype", STORED)
def test_mean_squared_error(dtype: Dtype, shape: tuple[int, ...], target: Dtype) -> None:
    """Of numbers, stored as x or not, and of ids that stand for one-hot rows."""
    rows, width = math.prod(shape[:-1]), shape[-1]
    x = logits(rows, width, dtype).reshape(shape)
    y = ids(rows, width).reshape(shape[:-1]) if target == np.int64 else logits(rows + 1, width, target)[1:].reshape(shape)
    actual = in_both_orders(lambda device: cost.mean_squared_error(device, put(device, x), put(device, y), *factors(device)))
    check(actual, NUMPY.mean_squared_error(x, y, WEIGHT, GRAD_SCALE), dtype)


COSTS = (cost.cross_entropy, cost.cross_entropy_of_probabilities, cost.mean_squared_error)


@pytest.mark.parametrize("width", [5, 2048])
@pytest.mark.parametrize("of", COSTS)
def test_ignored_rows_cost_nothing(of: Callable[..., Result], width: int) -> None:
    """Loss and gradient are exactly zero, even where the logits are not finite."""
    x = np.full((3, width), np.nan, np.float16)
    loss, gradient = in_both_orders(lambda device: of(device, put(device, x), put(device, np.array([-1, -2, -(2**40)])), *factors(device)))
    assert loss == 0
    assert not gradient.any()


@pytest.mark.parametrize("weight", [-0.25, 0.0, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("width", [33, 2048])
@pytest.mark.parametrize("of", COSTS)
def test_weights_of_every_kind(of: Callable[..., Result], width: int, weight: float) -> None:
    """Negative ones turn the gradient around, none makes it nothing, and what is not finite shows where it does in the definition."""
    x, targets = np.abs(logits(5, width, FLOAT16)) / 4 + np.float16(0.01), ids(5, width)
    loss, gradient = in_both_orders(lambda device: of(device, put(device, x), put(device, targets), *factors(device, weight)))
    wanted_loss, wanted = getattr(NUMPY, of.__name__)(x, targets, weight, GRAD_SCALE)
    if np.isfinite(weight):
        check((loss, gradient), (wanted_loss, wanted), FLOAT16)
    else:
        np.testing.assert_array_equal(loss, wanted_loss)
        np.testing.assert_array_equal(gradient, wanted)


@pytest.mark.parametrize("of", COSTS)
def test_ids_of_another_dtype_are_a_bug(of: Callable[..., Result]) -> None:
    """Kernels would read them as int64."""
    device = EmulatedDevice()
    with pytest.raises(InvariantError, match="int32"):
        of(device, put(device, logits(3, 8, FLOAT16)), put(device, np.zeros(3, np.int32)), *factors(device))


@pytest.mark.parametrize("width", [5, 2048])
@pytest.mark.parametrize("of", COSTS)
def test_targets_beyond_the_vocabulary_show(of: Callable[..., Result], width: int) -> None:
    """Such a step cannot be applied: its loss and that row's gradient are NaN; no memory outside of the arrays is read."""
    x, targets = np.zeros((2, width), np.float16), np.array([width, 0])
    loss, gradient = in_both_orders(lambda device: of(device, put(device, x), put(device, targets), *factors(device)))
    assert np.isnan(loss)
    assert np.isnan(gradient[0]).all()
    assert np.isfinite(gradient[1]).all()


@pytest.mark.parametrize("width", [5, 2048])
@pytest.mark.parametrize("rest", [0, -np.inf])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_logits_that_are_not_finite_show(bad: float, rest: float, width: int) -> None:
    """Anywhere in a row, also beside nothing but -inf."""
    x, target = np.full((1, width), rest, np.float16), np.array([0])
    x[0, width // 2] = bad
    loss, gradient = in_both_orders(lambda device: cost.cross_entropy(device, put(device, x), put(device, target), *factors(device)))
    assert np.isnan(loss)
    assert np.isnan(gradient).all()


def test_impossible_logits_are_none() -> None:
    """-inf has probability zero and gradient zero."""
    x = np.array([[0, -np.inf, 0, -np.inf]], np.float32)
    actual = in_both_orders(lambda device: cost.cross_entropy(device, put(device, x), put(device, np.array([2])), *factors(device)))
    check(actual, (WEIGHT * np.log(2), WEIGHT * GRAD_SCALE * np.array([[0.5, 0, -0.5, 0]])), FLOAT32)


@pytest.mark.parametrize("width", [3, 2048])
def test_large_logits_do_not_overflow(width: int) -> None:
    """exp(1e4) would; the loss is the distance to the largest."""
    x = np.full((1, width), -1e4, np.float32)
    x[0, 0], x[0, 1] = 1e4, 0
    loss, gradient = in_both_orders(
        lambda device: cost.cross_entropy(device, put(device, x), put(device, np.array([1])), *factors(device, 1, 1))
    )
    assert loss == 1e4
    assert gradient[0].tolist() == [1, -1, *[0] * (width - 2)]


def test_an_overflow_reaches_the_gradient() -> None:
    """A loss scale too high for float16 shows as an infinity."""
    device = EmulatedDevice()
    _, gradient = cost.cross_entropy(
        device, put(device, np.zeros((1, 2), np.float16)), put(device, np.array([0])), *factors(device, 1, 2.0**20)
    )
    assert get(gradient).tolist() == [[-np.inf, np.inf]]


def test_no_rows() -> None:
    """Cost nothing, and clear accumulators that are not added to."""
    device = EmulatedDevice()
    none, nobody = put(device, np.zeros((0, 4), np.float16)), put(device, np.zeros(0, np.int64))
    for of in COSTS:
        loss, gradient = of(device, none, nobody, *factors(device))
        assert get(loss) == 0
        assert gradient.shape == (0, 4)
    w, into_w, into_b = (put(device, np.ones(shape, np.float32)) for shape in ((9, 4), (9, 4), 9))
    loss, dx = cost.lm_head_cross_entropy(device, none, w, None, nobody, *factors(device), into_w, into_b, False)
    assert get(loss) == 0
    assert dx is not None
    assert dx.shape == (0, 4)
    assert not get(into_w).any()
    assert not get(into_b).any()


class Head:
    """One LM head with its inputs."""

    def __init__(self, rows: int, vocabulary: int, x: Dtype, w: Dtype, bias: bool) -> None:
        draw = np.random.default_rng((rows, vocabulary)).standard_normal
        self.x, self.w = (draw((rows, 24)) * 0.5).astype(x), (draw((vocabulary, 24)) * 0.5).astype(w)
        self.b = draw(vocabulary).astype(w) if bias else None
        self.targets = ids(rows, vocabulary)
        self.into_w, self.into_b = (draw(shape).astype(np.float32) for shape in ((vocabulary, 24), vocabulary))

    def wanted(self, accumulate: bool) -> tuple[Any, ...]:
        """Loss, dx and the accumulators, as NumPy has them."""
        into_w, into_b = self.into_w.copy(), self.into_b.copy()
        loss, dx = NUMPY.lm_head_cross_entropy(
            self.x, self.w, self.b, self.targets, WEIGHT, GRAD_SCALE, into_w, None if self.b is None else into_b, accumulate
        )
        return loss, dx, into_w, into_b

    def actual(self, device: EmulatedDevice, accumulate: bool, training: bool = True) -> list[HostArray]:
        """The same on a device; only the loss in validation."""
        x, w, targets, into_w, into_b = (put(device, a) for a in (self.x, self.w, self.targets, self.into_w, self.into_b))
        b = None if self.b is None else put(device, self.b)
        loss, dx = cost.lm_head_cross_entropy(
            device, x, w, b, targets, *factors(device), into_w if training else None, into_b if training and b is not None else None,
            accumulate,
        )  # fmt: skip
        assert device.waits == 0
        return [get(loss)] if dx is None else [get(each) for each in (loss, dx, into_w, into_b)]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("vocabulary", [33, 1040])
@pytest.mark.parametrize(
    ("x", "w"), [(FLOAT16, FLOAT16), (BFLOAT16, BFLOAT16), (FLOAT32, FLOAT32), (FLOAT16, FLOAT32), (FLOAT32, BFLOAT16)]
)
def test_lm_head(x: Dtype, w: Dtype, vocabulary: int, bias: bool, accumulate: bool) -> None:
    """In one chunk; gradients are written or added; parameters may be stored otherwise than activations."""
    head = Head(19, vocabulary, x, w, bias)
    (loss, dx, into_w, into_b), again = (head.actual(EmulatedDevice(reverse=reverse), accumulate) for reverse in (False, True))
    assert [a.tobytes() for a in (loss, dx, into_w, into_b)] == [a.tobytes() for a in again]
    wanted = head.wanted(accumulate)
    assert dx.dtype == x
    assert_close(loss, wanted[0], precision_of(x), "loss")  # logits are rounded as they are stored
    for name, one, other in (("dx", dx, wanted[1]), ("dw", into_w, wanted[2]), ("db", into_b, wanted[3])):
        assert_close(one, other, precision_of(x), name)


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 400])
def test_chunks_are_invisible(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks give what one gives, but for rounding. Validation has the very loss of training."""
    head = Head(rows, 40, FLOAT16, FLOAT16, True)
    whole = head.actual(EmulatedDevice(), True)
    monkeypatch.setattr(cost, "LOGITS_BYTES", 128 * 40 * 2)
    device = EmulatedDevice()
    cut = head.actual(device, True)
    assert device.launched.count("product") == 3 * math.ceil(rows / 128)
    assert head.actual(EmulatedDevice(), False, training=False)[0] == cut[0]
    assert_close(cut[0], whole[0], "float32", "loss")
    assert_close(cut[1], whole[1], "float16", "dx")
    assert_close(cut[2], whole[2], "float16", "dw")
    assert_close(cut[3], whole[3], "float16", "db")


@pytest.mark.parametrize(
    ("rows", "vocabulary", "chunk"), [(65_536, 32_768, 8192), (16_384, 10_000, 16_384), (65_537, 32_768, 7296), (9, 2**30, 1)]
)
def test_chunks_are_even_and_bounded(rows: int, vocabulary: int, chunk: int) -> None:
    """All rows if their logits fit, else chunks of about one length; one row at least."""
    assert cost.chunk_rows(rows, vocabulary * 2) == chunk
    assert chunk * vocabulary * 2 <= max(cost.LOGITS_BYTES, vocabulary * 2)


def test_the_largest_head_never_holds_its_logits() -> None:
    """65,536 tokens of 32,768: half a GiB of logits at most, where all of them would take four."""
    device = Largest(90)
    x, w = device.empty((65_536, 512), FLOAT16), device.empty((32_768, 512), FLOAT16)
    targets, one = device.empty((65_536,), np.dtype(np.int64)), device.empty((), FLOAT32)
    cost.lm_head_cross_entropy(device, x, w, None, targets, one, one, device.empty((32_768, 512), FLOAT32), None, False)
    assert device.largest == 512 << 20


class Largest(DryDevice):
    """Remembers the bytes of the largest array."""

    largest = 0

    def empty(self, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
        """Measured."""
        array = super().empty(shape, dtype)
        self.largest = max(self.largest, array.nbytes)
        return array
