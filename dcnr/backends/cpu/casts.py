"""Float32 <-> float16 and bfloat16, by bits, rounding to nearest even, as numpy and ml_dtypes do.

NaN stays NaN, infinities and subnormals are exact. Numba knows neither 16-bit type, so kernels see their bits as uint16.
`wide` and `narrow` are what every operation uses at its borders: 16 bits are for storage, arithmetic is float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dcnr.backends.cpu.jit import exact, inner, kernel
from dcnr.backends.cpu.pool import Pool
from dcnr.backends.dtypes import dtype_of
from dcnr.errors import BackendUnavailable

Floats = npt.NDArray[Any]
FLOAT16, BFLOAT16 = dtype_of("float16"), dtype_of("bfloat16")
U4 = np.uint32
LOW_NONE, LOW_FLOAT16, LOW_BFLOAT16 = 0, 1, 2
"""How a kernel is told the type of a 16-bit array."""


@exact
def to_bfloat16(u: np.uint32) -> np.uint16:
    """The bits of float32 -> the bits of bfloat16; a NaN becomes the quiet one of its sign, as in ml_dtypes."""
    rounded = U4(U4(u + U4(0x7FFF)) + U4(U4(u >> U4(16)) & U4(1)))
    nan = U4(U4(u & U4(0x80000000)) | U4(0x7FC00000))
    return np.uint16(U4(rounded if U4(u & U4(0x7FFFFFFF)) <= U4(0x7F800000) else nan) >> U4(16))


@exact
def to_float16(u: np.uint32) -> np.uint16:
    """The bits of float32 -> the bits of float16; a NaN becomes the quiet one of its sign.

    Every step is cut back to 32 bits (Numba's sums of them have 64), for twice as many lanes in a vector.
    """
    a = U4(u & U4(0x7FFFFFFF))
    normal = U4(U4(U4(a - U4(0x37FFF001)) + U4(U4(a >> U4(13)) & U4(1))) >> U4(13))  # re-based by 112 << 23, plus half an ulp less one
    # Adding 0.5 lets the float32 adder round to float16's subnormal grid of 2**-24.
    subnormal = U4(np.float32(a.view(np.float32) + np.float32(0.5)).view(U4) - U4(0x3F000000))
    r = subnormal if a < U4(0x38800000) else normal
    r = U4(0x7C00) if a >= U4(0x477FF000) else r
    r = U4(0x7E00) if a > U4(0x7F800000) else r
    return np.uint16(U4(U4(u >> U4(16)) & U4(0x8000)) | r)


@exact
def from_float16(h: np.uint32) -> np.uint32:
    """The bits of float16 -> the bits of float32."""
    sign = U4((h & U4(0x8000)) << U4(16))
    # 2**112 re-bases the exponent, for normal and subnormal numbers alike.
    f = U4((h & U4(0x7FFF)) << U4(13)).view(np.float32) * U4(0x77800000).view(np.float32)
    bits = np.float32(f).view(np.uint32)
    special = (h & U4(0x7C00)) == U4(0x7C00)
    return U4(sign | (U4(0x7F800000) | U4((h & U4(0x3FF)) << U4(13)) if special else bits))


@kernel("void(i8, f4[::1], u2[::1])")
def narrow_kernel(kind: int, x: Floats, y: Floats) -> None:
    u = x.view(np.uint32)
    if kind == LOW_FLOAT16:
        for i in range(u.size):
            y[i] = to_float16(u[i])
    else:
        for i in range(u.size):
            y[i] = to_bfloat16(u[i])


@kernel("void(i8, u2[::1], f4[::1])")
def widen_kernel(kind: int, x: Floats, y: Floats) -> None:
    u = y.view(np.uint32)
    if kind == LOW_BFLOAT16:
        for i in range(x.size):
            u[i] = U4(U4(x[i]) << U4(16))
        return
    for i in range(x.size):
        u[i] = from_float16(U4(x[i]))


@inner
def round_run(kind: int, x: Floats) -> None:
    """Float32 `x`, rounded as if it had been stored in `kind` and read again."""
    u = x.view(np.uint32)
    if kind == LOW_FLOAT16:
        for i in range(u.size):
            u[i] = from_float16(U4(to_float16(u[i])))
    elif kind == LOW_BFLOAT16:
        for i in range(u.size):
            u[i] = U4(U4(to_bfloat16(u[i])) << U4(16))


def low_kind(dtype: np.dtype[Any]) -> int:
    """Which 16-bit type this is."""
    if dtype == FLOAT16:
        return LOW_FLOAT16
    if dtype == BFLOAT16:
        return LOW_BFLOAT16
    raise BackendUnavailable(
        f"The cpu backend does not compute in {dtype}.", "Store it as float32, float16 or bfloat16, or use the numpy backend."
    )


def wide(pool: Pool, x: Floats) -> Floats:
    """`x` as C-ordered float32: itself if it is that already."""
    if x.dtype.char == "f":
        return x if x.flags.c_contiguous and x.flags.writeable else copy_of(pool, x)
    kind = low_kind(x.dtype)
    if not x.flags.c_contiguous or not x.flags.writeable:
        x = copy_of(pool, x)
    y = pool.empty(x.shape)
    widen_kernel(kind, x.reshape(-1).view(np.uint16), y.reshape(-1))
    return y


def narrow(pool: Pool, y: Floats, dtype: np.dtype[Any]) -> Floats:
    """Float32 `y` rounded to `dtype`: itself if that is float32."""
    if dtype.char == "f":
        return y
    low = pool.empty(y.shape, dtype)
    narrow_kernel(low_kind(dtype), y.reshape(-1), low.reshape(-1).view(np.uint16))
    return low


def cast(pool: Pool, x: Floats, dtype: np.dtype[Any]) -> Floats:
    """`x` itself if it has `dtype`, else a rounded copy."""
    return x if x.dtype == dtype else narrow(pool, wide(pool, x), dtype)


def copy_of(pool: Pool, x: Floats) -> Floats:
    """A C-ordered copy of the same dtype."""
    y = pool.empty(x.shape, x.dtype)
    np.copyto(y, x)
    return y


def copy_into(pool: Pool, into: Floats, x: Floats) -> None:
    """into[...] = x, rounded."""
    if x.dtype.char == "f" and into.dtype.itemsize == 2 and into.flags.c_contiguous:
        narrow_kernel(low_kind(into.dtype), wide(pool, x).reshape(-1), into.reshape(-1).view(np.uint16))
    else:
        np.copyto(into, x if x.dtype == into.dtype else cast(pool, x, into.dtype))
