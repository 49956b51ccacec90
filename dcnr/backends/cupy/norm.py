"""Layer normalisation, alone or of a residual sum: bias, dropout, addition and norm are one kernel each way.

Rule 1: the width of rows is compiled into the kernels, so that a row lies in registers; each width of a network costs one compilation.
Rule 2: activations have one dtype, that of the first array; what comes in another is cast before. Parameters may have another one.
"""

from __future__ import annotations

from dcnr.backends.base import Philox, dropout_threshold
from dcnr.backends.cupy.array import FLOAT32, DeviceArray
from dcnr.backends.cupy.arrays import cast, group
from dcnr.backends.cupy.columns import no_rows, reduce_columns
from dcnr.backends.cupy.device import Argument, Device, blocks, parameter, storage
from dcnr.backends.cupy.random import NO_MASK, mask, mask_group

WARP = 32
LARGEST_TEAM = 1024
FORWARD_NUMBERS, BACKWARD_NUMBERS = 32, 16
"""Numbers of a row that a lane holds; more than that make a team of more lanes (`team_of` in `norm.cu`)."""
FORWARD_BLOCK, BACKWARD_BLOCK = 256, 128
"""Threads, where a team is a warp; else a team is a block."""
RESIDENT_THREADS = {2: 384, 4: 256}
"""That a multiprocessor holds of the backward, by bytes per element."""


def layernorm(
    device: Device, x_RD: DeviceArray, g_D: DeviceArray, b_D: DeviceArray | None, eps: float
) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    """See `Backend.layernorm`."""
    y_RD, mean_R, rstd_R = _results(device, x_RD)
    if x_RD.size:
        g, (b,) = _parameters(device, g_D, b_D)
        kernel = device.kernel("norm", "layernorm", *_defines(g, 8, x_RD, y_RD, b))
        _launch_forward(device, kernel, x_RD, (x_RD, g, b, float(eps), y_RD, mean_R, rstd_R))
    return y_RD, mean_R, rstd_R


def residual_norm(
    device: Device, x_RD: DeviceArray, bias_D: DeviceArray | None, residual_RD: DeviceArray, rate: float, rng: Philox | None,
    g_D: DeviceArray, b_D: DeviceArray | None, eps: float,
) -> tuple[DeviceArray, DeviceArray, DeviceArray, DeviceArray]:  # fmt: skip
    """See `Backend.residual_norm`."""
    y_RD, mean_R, rstd_R = _results(device, x_RD)
    sum_RD = device.empty(x_RD.shape, x_RD.dtype)
    if x_RD.size:
        packed, most = _mask(rate, rng)
        residual_RD = cast(device, residual_RD, x_RD.dtype)
        g, (b, bias) = _parameters(device, g_D, b_D, bias_D)
        defines = _defines(g, most, x_RD, residual_RD, sum_RD, y_RD, b, bias)
        kernel = device.kernel("norm", "residual_norm", *defines, f"DROPOUT={int(packed is not NO_MASK)}")
        args = x_RD, bias, residual_RD, packed, g, b, float(eps), sum_RD, y_RD, mean_R, rstd_R
        _launch_forward(device, kernel, x_RD, args)
    return sum_RD, y_RD, mean_R, rstd_R


def layernorm_backward(
    device: Device, dy_RD: DeviceArray, x_RD: DeviceArray, g_D: DeviceArray, mean_R: DeviceArray, rstd_R: DeviceArray,
    into_g: DeviceArray, into_b: DeviceArray | None, accumulate: bool,
) -> DeviceArray:  # fmt: skip
    """See `Backend.layernorm_backward`."""
    return _backward(device, (dy_RD, x_RD, mean_R, rstd_R, g_D, None), NO_MASK, 8, (into_g, into_b), accumulate)[1]


def residual_norm_backward(
    device: Device, dy_RD: DeviceArray, dsum_RD: DeviceArray | None, sum_RD: DeviceArray, rate: float, rng: Philox | None,
    g_D: DeviceArray, mean_R: DeviceArray, rstd_R: DeviceArray,
    into_bias: DeviceArray | None, into_g: DeviceArray, into_b: DeviceArray | None, accumulate: bool,
) -> tuple[DeviceArray, DeviceArray]:  # fmt: skip
    """See `Backend.residual_norm_backward`; where nothing is dropped, both are one array."""
    intos = (into_g, into_b) if into_bias is None else (into_g, into_b, into_bias)
    return _backward(device, (dy_RD, sum_RD, mean_R, rstd_R, g_D, dsum_RD), *_mask(rate, rng), intos, accumulate)


Inputs = tuple[DeviceArray, DeviceArray, DeviceArray, DeviceArray, DeviceArray, DeviceArray | None]
"""dy, x, mean, rstd, g, dsum."""


def _backward(
    device: Device, inputs: Inputs, packed: bytes, most: int, intos: tuple[DeviceArray | None, ...], accumulate: bool
) -> tuple[DeviceArray, DeviceArray]:
    """(dx, dresidual), and one partial sum per block and column for each of `intos`, which one more launch adds up."""
    dy, x, mean, rstd, g, dsum = inputs
    x, dsum = cast(device, x, dy.dtype), None if dsum is None else cast(device, dsum, dy.dtype)
    width = x.shape[-1]
    dresidual = device.empty(x.shape, dy.dtype)
    dx = dresidual if packed is NO_MASK else device.empty(x.shape, dy.dtype)
    if not x.size:
        no_rows(device, intos, accumulate)
        return dx, dresidual
    defines = _defines(g, most, dy, x, dresidual, dx, dsum)
    flags = f"DROPOUT={int(dx is not dresidual)}", f"DSUM={int(dsum is not None)}", f"SUMS={len(intos)}"
    rows, team = x.size // width, _team(width, BACKWARD_NUMBERS)
    block = BACKWARD_BLOCK if team == WARP else team
    count = min(blocks(rows, block // team), device.multiprocessors * max(1, RESIDENT_THREADS[dy.dtype.itemsize] // block))
    part = device.empty((count, len(intos) * width), FLOAT32)
    kernel = device.kernel("norm", "norm_backward", *defines, *flags)
    device.launch(kernel, (count, 1), block, (dy, x, mean, rstd, g, dsum, packed, dresidual, None if dx is dresidual else dx, part, rows))
    reduce_columns(device, part, intos, accumulate)
    return dx, dresidual


def _results(device: Device, x_RD: DeviceArray) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    """Room for y, mean and rstd."""
    leading = x_RD.shape[:-1]
    return device.empty(x_RD.shape, x_RD.dtype), device.empty(leading, FLOAT32), device.empty(leading, FLOAT32)


def _parameters(device: Device, g: DeviceArray, *others: DeviceArray | None) -> tuple[DeviceArray, list[DeviceArray | None]]:
    """As they are if they have one dtype, else float32 copies."""
    dtype = g.dtype if all(array is None or array.dtype == g.dtype for array in others) else FLOAT32
    return cast(device, g, dtype), [None if array is None else cast(device, array, dtype) for array in others]


def _defines(g: DeviceArray, most: int, x: DeviceArray, *others: DeviceArray | None) -> tuple[str, ...]:
    """What norm kernels are compiled for."""
    width = x.shape[-1]
    size = min(most, group(x, g, *(array for array in others if array is not None), width=width))
    return storage(x.dtype), parameter(g.dtype), f"GROUP={size}", f"WIDTH={width}"


def _mask(rate: float, rng: Philox | None) -> tuple[bytes, int]:
    """The mask, and how many elements it lets a kernel take at once."""
    if rng is None or not dropout_threshold(rate):
        return NO_MASK, 8
    return mask(rng, rate), mask_group(rng)


def _team(width: int, numbers: int) -> int:
    """Lanes for a row, if each holds so many numbers."""
    needed = -(-width // numbers)
    return min(LARGEST_TEAM, max(WARP, 1 << (needed - 1).bit_length()))


def _launch_forward(device: Device, kernel: object, x: DeviceArray, args: tuple[Argument, ...]) -> None:
    width = x.shape[-1]
    rows, team = x.size // width, _team(width, FORWARD_NUMBERS)
    block = FORWARD_BLOCK if team == WARP else team
    device.launch(kernel, (blocks(rows, block // team), 1), block, (*args, rows))
