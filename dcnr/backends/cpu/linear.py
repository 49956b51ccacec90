"""Linear layers: OpenBLAS products through NumPy, the rest of the layer in one pass of a kernel.

Shape suffixes as in `backends/base.py`: R rows, I inputs, O outputs, F outputs after the activation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dcnr.backends.base import Activation
from dcnr.backends.cpu.activation import CODES, NOTHING, activate_rows, activate_rows_backward, add_bias, column_sums
from dcnr.backends.cpu.casts import narrow, wide
from dcnr.backends.cpu.jit import kernel
from dcnr.backends.cpu.pool import Pool

Floats = npt.NDArray[Any]


@kernel("void(f4[::1], f4[::1])")
def add_flat(into: Floats, x: Floats) -> None:
    """into += x."""
    for i in range(into.size):
        into[i] += x[i]


def vector(pool: Pool, b: Floats | None) -> Floats:
    """A vector for a kernel."""
    return NOTHING if b is None else wide(pool, b)


def product_into(pool: Pool, a: Floats, b: Floats, into: Floats, accumulate: bool) -> None:
    """into (+)= a @ b."""
    if not accumulate:
        np.matmul(a, b, out=into)
        return
    scratch = pool.empty(into.shape)
    np.matmul(a, b, out=scratch)
    add_flat(into.reshape(-1), scratch.reshape(-1))


def linear(pool: Pool, x: Floats, w_OI: Floats, b_O: Floats | None, activation: Activation | None) -> tuple[Floats, Floats | None]:
    """See `Backend.linear`."""
    outputs, inputs = w_OI.shape
    leading = x.shape[:-1]
    x_RI = wide(pool, x).reshape(-1, inputs)
    y_RO = pool.empty((x_RI.shape[0], outputs))
    np.matmul(x_RI, wide(pool, w_OI).T, out=y_RO)
    if activation is None:
        if b_O is not None:
            add_bias(y_RO, wide(pool, b_O))
        return narrow(pool, y_RO.reshape(*leading, outputs), x.dtype), None
    width = outputs // 2 if activation == "swiglu" else outputs
    act_RF = pool.empty((x_RI.shape[0], width))
    activate_rows(CODES[activation], y_RO, vector(pool, b_O), act_RF)
    return (
        narrow(pool, act_RF.reshape(*leading, width), x.dtype),
        narrow(pool, y_RO.reshape(*leading, outputs), x.dtype),
    )


def linear_backward(
    pool: Pool,
    dy: Floats,
    x: Floats,
    w_OI: Floats,
    pre: Floats | None,
    activation: Activation | None,
    into_w: Floats,
    into_b: Floats | None,
    accumulate: bool,
    need_dx: bool,
) -> Floats | None:
    """See `Backend.linear_backward`."""
    outputs, inputs = w_OI.shape
    dy_RO = wide(pool, dy).reshape(-1, dy.shape[-1])
    if activation is not None and pre is not None:
        pre_RO = wide(pool, pre).reshape(-1, outputs)
        dpre_RO = pool.empty(pre_RO.shape)
        activate_rows_backward(CODES[activation], dy_RO, pre_RO, dpre_RO, NOTHING if into_b is None else into_b, accumulate)
        dy_RO = dpre_RO
    elif into_b is not None:
        column_sums(dy_RO, into_b, accumulate)
    product_into(pool, dy_RO.T, wide(pool, x).reshape(-1, inputs), into_w, accumulate)
    if not need_dx:
        return None
    dx_RI = pool.empty((dy_RO.shape[0], inputs))
    np.matmul(dy_RO, wide(pool, w_OI), out=dx_RI)
    return narrow(pool, dx_RI.reshape(x.shape), x.dtype)
