"""Without the fused LM head its parts give the same."""

from __future__ import annotations

import numpy as np
import pytest

from dcnr.backends.base import HostArray, Precision
from dcnr.backends.cupy.backend import CupyBackend
from tests.backends.cupy.emulator.device import EmulatedDevice
from tests.tolerances import assert_close


def draw(*shape: int, seed: int = 0) -> HostArray:
    """Normal numbers that depend on the shape and the seed alone."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)


def lm_head(backend: CupyBackend, precision: Precision, accumulate: bool) -> list[HostArray]:
    """(loss, dx, dw, db) of a small head; some rows do not count."""
    x, w, b = (backend.from_host(draw(*shape, seed=seed), precision) for seed, shape in enumerate(((9, 16), (40, 16), (40,))))
    targets = backend.from_host(np.array([0, 39, -1, 5, 7, -1, 20, 1, 2]))
    into_w, into_b = backend.from_host(draw(40, 16, seed=3)), backend.from_host(draw(40, seed=4))
    loss, dx = backend.lm_head_cross_entropy(x, w, b, targets, backend.scalar(0.125), backend.scalar(8.0), into_w, into_b, accumulate)
    assert dx is not None
    return [np.asarray(backend.to_host(array), np.float64) for array in (loss, dx, into_w, into_b)]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_the_parts_give_what_the_whole_gives(precision: Precision, accumulate: bool) -> None:
    """Loss and all gradients, within rounding."""
    apart, whole = (CupyBackend(EmulatedDevice(), fused_lm_head=fused) for fused in (False, True))
    for got, wanted in zip(lm_head(apart, precision, accumulate), lm_head(whole, precision, accumulate), strict=True):
        assert_close(got, wanted, precision)


def test_validation_has_no_gradient() -> None:
    """Without accumulators only the loss is made."""
    device = EmulatedDevice()
    backend = CupyBackend(device, fused_lm_head=False)
    x, w, targets = backend.from_host(draw(3, 16)), backend.from_host(draw(40, 16)), backend.from_host(np.array([1, 2, 3]))
    assert backend.lm_head_cross_entropy(x, w, None, targets, backend.scalar(1.0), backend.scalar(1.0), None, None, False)[1] is None
    assert device.launched.count("product") == 1
