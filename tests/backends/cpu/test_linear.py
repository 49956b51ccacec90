"""Products with bias and activation."""

from __future__ import annotations

from typing import Any

import pytest

from dcnr.backends.base import Activation, Backend, Precision
from tests.backends.cpu.pair import SIZES, STORED, accumulators, draw, same


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu", "swiglu"])
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_backward(rows: int, activation: Activation | None, bias: bool, precision: Precision) -> None:
    """y, pre, dx, dw and db, written and then added to."""
    inputs, outputs = 33, 14
    width = outputs // 2 if activation == "swiglu" else outputs

    def operation(backend: Backend, put: Any) -> tuple[Any, ...]:
        x, w = put(draw(rows, inputs)), put(draw(outputs, inputs))
        b = put(draw(outputs)) if bias else None
        dy = put(draw(rows, width, seed=1))
        y, pre = backend.linear(x, w, b, activation)
        into_w, into_b = accumulators(backend, (outputs, inputs), (outputs,))
        dx = backend.linear_backward(dy, x, w, b, pre, activation, into_w, into_b if bias else None, False, True)
        none = backend.linear_backward(dy, x, w, b, pre, activation, into_w, into_b if bias else None, True, False)
        assert none is None
        return y, pre, dx, into_w, into_b

    same(operation, precision)
