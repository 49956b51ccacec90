"""The two backends side by side: `same` runs one operation on both and compares everything that comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dcnr.backends.base import Backend, Precision
from dcnr.backends.load import load_backend
from tests.tolerances import assert_close

Array = npt.NDArray[Any]
CPU, NUMPY = load_backend("cpu"), load_backend("numpy")
STORED: tuple[Precision, ...] = ("float32", "float16", "bfloat16")
SIZES = (1, 7, 33, 127)


def draw(*shape: int, seed: int = 0) -> Array:
    """Normal numbers that depend on the shape and the seed alone."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)


def same(operation: Callable[[Backend, Callable[[Array], Array]], tuple[Any, ...]], precision: Precision = "float32") -> None:
    """`operation(backend, put)` gives the same results on both; `put` moves an array to the backend in `precision`."""
    actual, wanted = (operation(backend, lambda x, b=backend: b.from_host(x, precision)) for backend in (CPU, NUMPY))  # type: ignore[misc]
    assert len(actual) == len(wanted)
    for index, (a, w) in enumerate(zip(actual, wanted, strict=True)):
        if w is None:
            assert a is None
            continue
        assert np.asarray(a).dtype == np.asarray(w).dtype
        assert_close(a, w, precision, f"result {index}")


def accumulators(backend: Backend, *shapes: tuple[int, ...]) -> list[Array]:
    """Float32 gradients that already hold something, to be added to or overwritten."""
    return [backend.from_host(draw(*shape, seed=99)) for shape in shapes]
