"""Scalar functions of kernels: exp, erf, and the largest value of a row.

exp: Cephes' expf (range reduction by ln 2 in two parts, polynomial of degree 5), within 2 units in the last place.
erf: the rational approximation of Eigen's generic_fast_erf_float, absolute error below 3e-7; exactly +-1 beyond +-3.93.
All of them turn NaN into NaN.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dcnr.backends.cpu.jit import exact, inner

F4 = np.float32


@exact
def exp(x: np.float32) -> np.float32:
    """e**x; 0 where that is below the normal numbers."""
    # Adding 1.5 * 2**23 rounds to an integer, which then stands in the low bits.
    z = x * F4(1.44269504088896341) + F4(12582912.0)
    n = z - F4(12582912.0)
    r = x - n * F4(0.693359375)
    r = r + n * F4(2.12194440e-4)
    p = F4(1.9875691500e-4)
    p = p * r + F4(1.3981999507e-3)
    p = p * r + F4(8.3334519073e-3)
    p = p * r + F4(4.1665795894e-2)
    p = p * r + F4(1.6666665459e-1)
    p = p * r + F4(5.0000001201e-1)
    p = p * (r * r) + r + F4(1.0)
    exponent = np.int32(np.float32(z).view(np.int32) << np.int32(23))
    y = np.int32(np.float32(p).view(np.int32) + exponent).view(np.float32)
    y = F4(0.0) if x < F4(-87.33654) else y
    y = F4(np.inf) if x > F4(88.72283) else y
    return y if x == x else x


@exact
def erf(x: np.float32) -> np.float32:
    """The error function."""
    c = F4(-4.0) if x < F4(-4.0) else (F4(4.0) if x > F4(4.0) else x)
    t = c * c
    p = F4(-2.72614225801306e-10)
    p = p * t + F4(2.77068142495902e-08)
    p = p * t + F4(-2.10102402082508e-06)
    p = p * t + F4(-5.69250639462346e-05)
    p = p * t + F4(-7.34990630326855e-04)
    p = p * t + F4(-2.95459980854025e-03)
    p = p * t + F4(-1.60960333262415e-02)
    q = F4(-1.45660718464996e-05)
    q = q * t + F4(-2.13374055278905e-04)
    q = q * t + F4(-1.68282697438203e-03)
    q = q * t + F4(-7.37332916720468e-03)
    q = q * t + F4(-1.42647390514189e-02)
    y = c * p / q
    return F4(-1.0) if x < F4(-3.93) else (F4(1.0) if x > F4(3.93) else y)


@exact
def sigmoid(x: np.float32) -> np.float32:
    """1 / (1 + e**-x)."""
    return F4(1.0) / (F4(1.0) + exp(-x))


@inner
def largest(x: npt.NDArray[np.float32]) -> np.float32:
    """The largest value of a row; may skip NaN.

    Compared as sortable integers: a float maximum is not vectorised unless NaN is ruled out.
    """
    bits = x.view(np.int32)
    top = np.int32(-2147483648)
    for j in range(bits.size):
        b = bits[j]
        top = max(top, np.int32(b ^ ((b >> np.int32(31)) & np.int32(0x7FFFFFFF))))
    return np.int32(top ^ ((top >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@inner
def copy_row(x: npt.NDArray[np.float32], y: npt.NDArray[np.float32]) -> None:
    for d in range(x.size):
        y[d] = x[d]
