"""Token, position and rotary embedding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dcnr.backends.base import Backend, Precision, Rope
from tests.backends.cpu.pair import CPU, SIZES, STORED, accumulators, draw, same


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("positions", SIZES)
def test_forward_and_backward(positions: int, learned: bool, precision: Precision) -> None:
    """Ids that occur many times, and fewer positions than the table has."""
    ids = np.random.default_rng(positions).integers(0, 7, (3, positions))

    def operation(backend: Backend, put: Any) -> tuple[Any, ...]:
        table = put(draw(127, 33)) if learned else None
        y = backend.embedding(backend.from_host(ids), put(draw(7, 33)), table, precision)
        into_w, into_p = accumulators(backend, (7, 33), (127, 33))
        for accumulate in (False, True):
            backend.embedding_backward(put(draw(3, positions, 33)), ids, into_w, into_p if learned else None, accumulate)
        return y, into_w, into_p

    same(operation, precision)


@pytest.mark.parametrize("wrong", [-1, 7, 10**12])
def test_ids_outside_of_the_vocabulary_are_refused(wrong: int) -> None:
    """A kernel would read whatever lies there."""
    with pytest.raises(IndexError, match="vocabulary of 7"):
        CPU.embedding(np.array([[0, wrong]]), draw(7, 3), None, "float32")


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize(("positions", "width"), [(1, 2), (7, 34), (127, 128), (33, 6)])
def test_rotate(positions: int, width: int, precision: Precision) -> None:
    """Forward and backward."""
    rope = Rope(1000.0)
    same(
        lambda backend, put: tuple(backend.rotate(put(draw(3, positions, width)), rope, backward) for backward in (False, True)),
        precision,
    )


def test_rotating_back_gives_the_same() -> None:
    """The backward is the inverse: rotations are orthogonal."""
    x = draw(2, 33, 8)
    back = CPU.rotate(CPU.rotate(CPU.from_host(x), Rope(1e4)), Rope(1e4), backward=True)
    np.testing.assert_allclose(back, x, atol=1e-6)
