"""How far results may lie apart, per dtype, in one place.

An error is measured against the largest magnitude of what is compared, so that cancellation in one element does not excuse the others.
Nothing here is looser than 2 % of that scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dcnr.backends.base import Precision

TOLERANCE: dict[Precision, float] = {"float64": 1e-6, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Largest |difference| / largest |wanted|. The first is for finite differences, the others are a few units in the last place."""

ROUNDED_WIRE = 2e-2
"""Relative difference of a loss of eight steps when hops between agents are rounded to `int8`."""

EXPORTED: dict[str, float] = {"float32": 1e-5, "float16": 1e-2}
"""Logits of a whole network, by how it stores its numbers, against PyTorch in float32 on what was exported: as `worst_error` has it.
Seen: 2e-6 and 2e-3 in networks of two blocks."""

TINY = 1e-30
"""Below this everything is zero."""


def worst_error(actual: npt.ArrayLike, wanted: npt.ArrayLike) -> float:
    """The largest difference, measured against the largest wanted value; infinite if shapes, infinities or NaNs differ."""
    a, w = (np.asarray(x).astype(np.float64) for x in (actual, wanted))
    finite = np.isfinite(w)
    if a.shape != w.shape or not np.array_equal(np.where(finite, 0, a), np.where(finite, 0, w), equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    return float(np.abs(a[finite] - w[finite]).max() / max(np.abs(w[finite]).max(), TINY))


def assert_close(actual: Any, wanted: Any, precision: Precision, what: str = "result") -> None:
    """Equal shapes, and no element further apart than the precision allows."""
    error = worst_error(actual, wanted)
    shapes = (np.shape(actual), np.shape(wanted))
    assert error <= TOLERANCE[precision], f"{what}: error {error:.2e} > {TOLERANCE[precision]:.0e} ({precision}), shapes {shapes}"
