"""Linear layers: cuBLASLt's products, the rest of the layer in the kernels of the activation.

Rule 1: where an activation follows, the product leaves the bias to the kernel that reads its result anyway: what is kept for the
backward (`pre`) is the bare product.
Rule 2: weight gradients go straight into the float32 accumulators, in the product's own sums.
Rule 3: operands of different dtypes meet in float32.

Shape suffixes as in `backends/base.py`: R rows, I inputs, O outputs.
"""

from __future__ import annotations

import math

from dcnr.backends.base import Activation
from dcnr.backends.cupy import activation
from dcnr.backends.cupy.array import FLOAT32, DeviceArray, Dtype
from dcnr.backends.cupy.arrays import cast, column_sums
from dcnr.backends.cupy.device import Device, Product

FORWARD = Product(transpose_a=False, transpose_b=True)
INPUT_GRADIENT = Product(transpose_a=False, transpose_b=False)
WEIGHT_GRADIENT = Product(transpose_a=True, transpose_b=False)


def linear(
    device: Device, x: DeviceArray, w_OI: DeviceArray, b_O: DeviceArray | None, kind: Activation | None
) -> tuple[DeviceArray, DeviceArray | None]:
    """See `Backend.linear`; `x` may have any leading axes."""
    outputs, inputs = w_OI.shape
    leading = x.shape[:-1]
    x_RI = x.reshape(math.prod(leading), inputs)
    bias = b_O if kind is None else None
    y = product(device, FORWARD, x_RI, w_OI, x.dtype, bias).reshape(*leading, outputs)
    if kind is None:
        return y, None
    return activation.forward(device, kind, y, b_O), y


def linear_backward(
    device: Device,
    dy: DeviceArray,
    x: DeviceArray,
    w_OI: DeviceArray,
    b_O: DeviceArray | None,
    pre: DeviceArray | None,
    kind: Activation | None,
    into_w: DeviceArray,
    into_b: DeviceArray | None,
    accumulate: bool,
    need_dx: bool,
) -> DeviceArray | None:
    """See `Backend.linear_backward`."""
    outputs, inputs = w_OI.shape
    rows = math.prod(x.shape[:-1])
    dpre = dy
    if kind is not None and pre is not None:
        dpre = activation.backward(device, kind, dy, pre, b_O, into_b, accumulate)
    elif into_b is not None:
        column_sums(device, dy.reshape(rows, outputs), into_b, accumulate)
    dpre_RO = dpre.reshape(rows, outputs)
    add_product(device, WEIGHT_GRADIENT, dpre_RO, x.reshape(rows, inputs), into_w, accumulate)
    if not need_dx:
        return None
    return product(device, INPUT_GRADIENT, dpre_RO, w_OI, dy.dtype).reshape(*x.shape)


def product(device: Device, kind: Product, a: DeviceArray, b: DeviceArray, dtype: Dtype, bias: DeviceArray | None = None) -> DeviceArray:
    """A new array of `dtype`."""
    a, b = _alike(device, a, b)
    m, n = a.shape[int(kind.transpose_a)], b.shape[int(not kind.transpose_b)]
    kept = dtype if dtype in {a.dtype, FLOAT32} else FLOAT32
    out = device.empty((m, n), kept)
    if out.size:
        device.product(kind, a, b, out, None if bias is None else cast(device, bias, kept))
    return cast(device, out, dtype)


def add_product(device: Device, kind: Product, a: DeviceArray, b: DeviceArray, into: DeviceArray, accumulate: bool) -> None:
    """The same into a float32 accumulator; a sum over nothing is zero."""
    a, b = _alike(device, a, b)
    if into.size and a.size and b.size:
        device.product(kind._replace(accumulate=accumulate), a, b, into)
    elif not accumulate:
        device.clear(into)


def _alike(device: Device, a: DeviceArray, b: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
    return (a, b) if a.dtype == b.dtype else (cast(device, a, FLOAT32), cast(device, b, FLOAT32))
