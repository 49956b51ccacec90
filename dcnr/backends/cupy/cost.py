"""Costs, and the LM head that computes its own in chunks of tokens.

Rule 1: logits are read once and their gradient is written once, by one launch, in place inside of the LM head.
Rule 2: never more than `LOGITS_BYTES` of logits exist in the LM head (but one token's always).
Rule 3: losses are float32 per row, their sum is float64 in a fixed order; a loss is a 0-d float64 array, which nobody waits for.

Shape suffixes: R rows (tokens), V vocabulary, D width, C rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcnr.backends.cupy.array import FLOAT32, FLOAT64, DeviceArray
from dcnr.backends.cupy.arrays import cast, check_ids, column_sums, group
from dcnr.backends.cupy.columns import no_rows
from dcnr.backends.cupy.device import Device, blocks, storage
from dcnr.backends.cupy.linear import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT

LOGITS_BYTES = 512 << 20
"""Enough that products and the accumulation into dw run at full speed; twice as much gains 1 %."""
CHUNK_ROWS = 128
"""Chunks are multiples of this, if they are longer."""
SHORT_ROW = 1024
"""Up to here a warp takes a row, beyond a block."""
HELD = {
    2: ((128, 2, 12), (256, 5, 6), (512, 4, 3), (512, 8, 2), (1024, 8, 1)),
    4: ((128, 2, 10), (256, 5, 3), (512, 4, 2), (512, 8, 1)),
}
"""Per bytes of an element: threads a row, vectors of eight a thread, blocks a multiprocessor, as fit the registers."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Scalars that lie in device memory: the loss is multiplied by `weight`, its gradient by both."""

    weight: DeviceArray
    grad_scale: DeviceArray


def cross_entropy(
    device: Device, logits: DeviceArray, targets: DeviceArray, weight: DeviceArray, grad_scale: DeviceArray
) -> tuple[DeviceArray, DeviceArray]:
    """See `Backend.cross_entropy`. A target beyond the vocabulary makes loss and gradient NaN."""
    check_ids(targets)
    gradient = device.empty(logits.shape, logits.dtype)
    losses_R = device.empty((targets.size,), FLOAT32)
    x_RV = logits.reshape(targets.size, logits.shape[-1])
    _softmax_rows(device, x_RV, gradient.reshape(*x_RV.shape), targets, None, losses_R, Factors(weight, grad_scale))
    return _total(device, losses_R, weight), gradient


def cross_entropy_of_probabilities(
    device: Device, p: DeviceArray, targets: DeviceArray, weight: DeviceArray, grad_scale: DeviceArray
) -> tuple[DeviceArray, DeviceArray]:
    """See `Backend.cross_entropy_of_probabilities`."""
    check_ids(targets)
    gradient = device.empty(p.shape, p.dtype)
    losses_R = device.empty((targets.size,), FLOAT32)
    _rows(device, "probability_cost", p, (p, gradient, targets, losses_R, weight, grad_scale), targets.size)
    return _total(device, losses_R, weight), gradient


def mean_squared_error(
    device: Device, x: DeviceArray, target: DeviceArray, weight: DeviceArray, grad_scale: DeviceArray
) -> tuple[DeviceArray, DeviceArray]:
    """See `Backend.mean_squared_error`. Numbers of another dtype than x meet it in float32."""
    are_ids = target.dtype.kind in "iu"
    if are_ids:
        check_ids(target)
    dtype = x.dtype if are_ids or target.dtype == x.dtype else FLOAT32
    y = cast(device, x, dtype)
    gradient = device.empty(x.shape, dtype)
    losses_R = device.empty((x.size // x.shape[-1],), FLOAT32)
    numbers, ids = (None, target) if are_ids else (cast(device, target, dtype), None)
    _rows(device, "squared_error", y, (y, numbers, ids, gradient, losses_R, weight, grad_scale), losses_R.size)
    return _total(device, losses_R, weight), cast(device, gradient, x.dtype)


def lm_head_cross_entropy(
    device: Device,
    x: DeviceArray,
    w_VD: DeviceArray,
    b_V: DeviceArray | None,
    targets: DeviceArray,
    weight: DeviceArray,
    grad_scale: DeviceArray,
    into_w: DeviceArray | None,
    into_b: DeviceArray | None,
    accumulate: bool,
) -> tuple[DeviceArray, DeviceArray | None]:
    """See `Backend.lm_head_cross_entropy`. Operands of different dtypes meet in float32."""
    check_ids(targets)
    dtype = x.dtype if x.dtype == w_VD.dtype else FLOAT32
    vocabulary, width = w_VD.shape
    rows = targets.size
    x_RD, w_VD = cast(device, x, dtype).reshape(rows, width), cast(device, w_VD, dtype)
    bias = None if b_V is None else cast(device, b_V, FLOAT32)
    factors = Factors(weight, grad_scale)
    losses_R = device.empty((rows,), FLOAT32)
    chunk = chunk_rows(rows, vocabulary * dtype.itemsize)
    logits_CV = device.empty((chunk, vocabulary), dtype)
    dx_RD = None if into_w is None else device.empty((rows, width), dtype)
    for start in range(0, rows, max(1, chunk)):
        part = slice(start, min(rows, start + chunk))
        d_CV = logits_CV[: part.stop - start]
        device.product(FORWARD, x_RD[part], w_VD, d_CV)
        _softmax_rows(device, d_CV, None if dx_RD is None else d_CV, targets.reshape(rows)[part], bias, losses_R[part], factors)
        if dx_RD is None or into_w is None:
            continue
        adding = accumulate or start > 0
        device.product(INPUT_GRADIENT, d_CV, w_VD, dx_RD[part])
        device.product(WEIGHT_GRADIENT._replace(accumulate=adding), d_CV, x_RD[part], into_w)
        if into_b is not None:
            column_sums(device, d_CV, into_b, adding)
    if rows == 0:
        no_rows(device, (into_w, into_b), accumulate)
    return _total(device, losses_R, weight), None if dx_RD is None else cast(device, dx_RD, x.dtype).reshape(*x.shape)


def chunk_rows(rows: int, row_bytes: int) -> int:
    """Rows of a chunk: all if they fit, else chunks of about the same length."""
    most = max(1, LOGITS_BYTES // row_bytes)
    if rows <= most:
        return rows
    if most < CHUNK_ROWS:
        return most
    even = blocks(rows, blocks(rows, most // CHUNK_ROWS * CHUNK_ROWS))
    return blocks(even, CHUNK_ROWS) * CHUNK_ROWS


def _softmax_rows(
    device: Device, x_RV: DeviceArray, d_RV: DeviceArray | None, targets: DeviceArray, bias: DeviceArray | None,
    losses_R: DeviceArray, factors: Factors,
) -> None:  # fmt: skip
    """Losses, and gradients if somebody wants them (`d` may be `x`)."""
    rows, vocabulary = x_RV.shape
    args = (x_RV, d_RV, targets, bias, losses_R, factors.weight, factors.grad_scale)
    arrays = [array for array in (x_RV, d_RV, bias) if array is not None]
    fitting = [shape for shape in HELD[x_RV.dtype.itemsize] if shape[0] * shape[1] * 8 >= vocabulary]
    if vocabulary <= SHORT_ROW or not fitting or group(*arrays, width=vocabulary) != 8:
        _rows(device, "cross_entropy_read", x_RV, args, rows)
    elif rows:
        threads, vectors, resident = fitting[0]
        defines = (f"THREADS={threads}", f"VECTORS={vectors}", f"BLOCKS={resident}")
        kernel = device.kernel("cost", "cross_entropy_held", storage(x_RV.dtype), *defines)
        device.launch(kernel, (rows, 1), threads, (*args, vocabulary))


def _rows(device: Device, name: str, x: DeviceArray, args: tuple[DeviceArray | None, ...], rows: int) -> None:
    """Launch a kernel that gives each row, the last axis of `x`, a warp or a block."""
    if rows:
        threads = 32 if x.shape[-1] <= SHORT_ROW else 256
        kernel = device.kernel("cost", name, storage(x.dtype), f"GROUP={threads}")
        device.launch(kernel, (blocks(rows, 256 // threads), 1), 256, (*args, x.shape[-1], rows))


def _total(device: Device, losses_R: DeviceArray, weight: DeviceArray) -> DeviceArray:
    total = device.empty((), FLOAT64)
    device.launch(device.kernel("cost", "total_loss", "STORAGE=1"), (1, 1), 1024, (losses_R, weight, total, losses_R.size))
    return total
