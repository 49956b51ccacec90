"""Matrix products by cuBLASLt, through ctypes; the library is the one that comes with CuPy.

Rule 1: a row-major [R, C] matrix is a column-major C x R one, so out = a b is asked for as outᵀ = bᵀ aᵀ: nothing is transposed in memory,
and cuBLASLt's bias, which runs along the rows of what it sees, joins every row of `out`.
Rule 2: sums are float32, products of float32 are too (no TF32). Of the algorithms the first that the heuristics name is taken, and kept:
a choice by timing would differ from process to process, and with it the rounding.
Rule 3: all products of a device run on one stream, so one workspace serves them all. The caller holds a lock.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dcnr.backends.cupy.array import FLOAT32, DeviceArray, Dtype
from dcnr.backends.cupy.device import Product
from dcnr.backends.cupy.libraries import load_library
from dcnr.errors import BackendUnavailable, InvariantError

WORKSPACE = 64 << 20
"""Bytes."""
REMEDY = "pip install nvidia-cublas (nvidia-cublas-cu12 with a driver for CUDA 12)"

# names and numbers of cublasLt.h
COMPUTE_32F = 68
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER = 3, 4, 7, 8
EPILOGUE_BIAS = 4
MAX_WORKSPACE, ALIGNMENT_A, ALIGNMENT_B, ALIGNMENT_C, ALIGNMENT_D = 1, 5, 6, 7, 8
DATA_TYPES: Mapping[str, int] = MappingProxyType({"float32": 0, "float16": 2, "bfloat16": 14})
MAX_ALIGNMENT = 256
ALIGNED = (MAX_ALIGNMENT, MAX_ALIGNMENT, MAX_ALIGNMENT)


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Key(NamedTuple):
    """What a plan depends on: of out [m, n] = a [m, k] b [k, n], with alignments of a, b and out in bytes."""

    kind: Product
    m: int
    n: int
    k: int
    dtype: Dtype
    out_dtype: Dtype
    bias: bool
    alignments: tuple[int, int, int]


class Products:
    """All products of one device."""

    def __init__(self, workspace: DeviceArray, stream: int) -> None:
        """`workspace` has `WORKSPACE` bytes; `stream` is a CUDA stream of the current device."""
        self._workspace = workspace
        self._stream = stream
        self._plans: dict[tuple[object, ...], _Plan] = {}
        """By `Key`, as a bare tuple."""
        handle = ctypes.c_void_p()
        _check(_library().cublasLtCreate(ctypes.byref(handle)))
        self._handle = handle

    def run(self, kind: Product, a: DeviceArray, b: DeviceArray, out: DeviceArray, bias: DeviceArray | None) -> None:
        """See `Device.product`. Raises `InvariantError` for shapes that do not match, `BackendUnavailable` for what cuBLASLt cannot do."""
        m, n = out.shape
        k = a.shape[0] if kind.transpose_a else a.shape[1]
        alignments = ALIGNED
        if (a.ptr | b.ptr | out.ptr) % MAX_ALIGNMENT:
            alignments = (_alignment(a.ptr), _alignment(b.ptr), _alignment(out.ptr))
        key = (kind, m, n, k, a.dtype, out.dtype, bias is not None, alignments)
        plan = self._plans.get(key)
        if plan is None:
            whole = Key(*key)
            _check_operands(whole, a, b, bias)
            plan = self._plans[key] = _Plan(self._handle, whole, self._workspace.ptr, self._stream)
        plan.run(a.ptr, b.ptr, out.ptr, 0 if bias is None else bias.ptr)


class _Plan:
    """One product with everything but the addresses settled; the arguments of the call are made once."""

    def __init__(self, handle: ctypes.c_void_p, key: Key, workspace: int, stream: int) -> None:
        self._key = key
        self._call = _library()["cublasLtMatmul"]  # without argtypes: prebuilt ctypes objects convert fastest
        self._describe(key)
        self._algorithm = self._choose(handle)
        self._alpha, self._beta = ctypes.c_float(1.0), ctypes.c_float(1.0 if key.kind.accumulate else 0.0)
        self._first, self._second, self._into = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._args = (
            handle, self._operation,
            ctypes.byref(self._alpha), self._first, self._layout_first, self._second, self._layout_second,
            ctypes.byref(self._beta), self._into, self._layout_out, self._into, self._layout_out,
            ctypes.byref(self._algorithm), ctypes.c_void_p(workspace), ctypes.c_size_t(WORKSPACE), ctypes.c_void_p(stream),
        )  # fmt: skip

    def run(self, a: int, b: int, out: int, bias: int) -> None:
        """Issue it for these addresses."""
        self._first.value, self._second.value, self._into.value = b, a, out
        if self._key.bias:
            self._set(BIAS_POINTER, ctypes.c_void_p(bias))
        status = self._call(*self._args)
        if status:
            raise BackendUnavailable(f"cuBLASLt fails (status {status}) at {_describe(self._key)}.", "restart the agent")

    def _describe(self, key: Key) -> None:
        kind, m, n, k = key.kind, key.m, key.n, key.k
        operation = ctypes.c_void_p()
        _check(_library().cublasLtMatmulDescCreate(ctypes.byref(operation), COMPUTE_32F, DATA_TYPES[FLOAT32.name]))
        self._operation = operation
        self._set(TRANSA, ctypes.c_int32(kind.transpose_b))
        self._set(TRANSB, ctypes.c_int32(kind.transpose_a))
        if key.bias:
            self._set(EPILOGUE, ctypes.c_uint32(EPILOGUE_BIAS))
        self._layout_first = _layout(key.dtype, *((k, n) if kind.transpose_b else (n, k)))
        self._layout_second = _layout(key.dtype, *((m, k) if kind.transpose_a else (k, m)))
        self._layout_out = _layout(key.out_dtype, n, m)

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _check(_library().cublasLtMatmulDescSetAttribute(self._operation, attribute, ctypes.byref(value), size))

    def _choose(self, handle: ctypes.c_void_p) -> Any:
        """The best algorithm for these alignments; where there is none, one for the least that elements have."""
        a, b, out = self._key.alignments
        least = self._key.dtype.itemsize
        for alignments in ((b, a, out, out), (least, least, least, least)):
            found = self._ask(handle, alignments)
            if found is not None:
                return found
        raise BackendUnavailable(
            f"cuBLASLt has no algorithm for {_describe(self._key)}.", "use other layer widths (multiples of 8), or --backend cpu"
        )

    def _ask(self, handle: ctypes.c_void_p, alignments: tuple[int, int, int, int]) -> Any:
        preference = ctypes.c_void_p()
        lib = _library()
        _check(lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        set_attribute = lib.cublasLtMatmulPreferenceSetAttribute
        _check(set_attribute(preference, MAX_WORKSPACE, ctypes.byref(ctypes.c_uint64(WORKSPACE)), ctypes.c_size_t(8)))
        for attribute, bytes_ in zip((ALIGNMENT_A, ALIGNMENT_B, ALIGNMENT_C, ALIGNMENT_D), alignments, strict=True):
            _check(set_attribute(preference, attribute, ctypes.byref(ctypes.c_uint32(bytes_)), ctypes.c_size_t(4)))
        result, count = _Heuristic(), ctypes.c_int()
        status = lib.cublasLtMatmulAlgoGetHeuristic(
            handle, self._operation, self._layout_first, self._layout_second, self._layout_out, self._layout_out,
            preference, 1, ctypes.byref(result), ctypes.byref(count),
        )  # fmt: skip
        _check(lib.cublasLtMatmulPreferenceDestroy(preference))
        return None if status or not count.value or result.state else (ctypes.c_uint64 * 8)(*result.algorithm)


def version() -> str:
    """Of the library, as 13.1.1. Raises `BackendUnavailable` where there is none."""
    ask = _library().cublasLtGetVersion
    ask.restype = ctypes.c_size_t
    number = int(ask())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _check_operands(key: Key, a: DeviceArray, b: DeviceArray, bias: DeviceArray | None) -> None:
    """Once per plan."""
    kind, m, n, k = key.kind, key.m, key.n, key.k
    fits = a.shape == ((k, m) if kind.transpose_a else (m, k)) and b.shape == ((n, k) if kind.transpose_b else (k, n))
    fits = fits and a.dtype == b.dtype and key.out_dtype in {key.dtype, FLOAT32} and min(m, n, k) > 0
    if bias is not None:
        fits = fits and bias.shape == (n,) and bias.dtype == key.out_dtype
    if not fits or key.dtype.name not in DATA_TYPES:
        raise InvariantError(f"no product: a {a.shape} {a.dtype}, b {b.shape} {b.dtype}, out {(m, n)} {key.out_dtype}, {kind}, bias {bias}")


def _describe(key: Key) -> str:
    sizes = f"[{key.m}, {key.k}] x [{key.k}, {key.n}]"
    return f"a product {sizes} of {key.dtype} to {key.out_dtype}, {key.kind}, aligned to {key.alignments} bytes"


def _alignment(address: int) -> int:
    """The largest power of two that divides it, up to what makes a difference."""
    return min(MAX_ALIGNMENT, address & -address)


def _layout(dtype: Dtype, rows: int, columns: int) -> ctypes.c_void_p:
    """A column-major matrix without gaps."""
    layout = ctypes.c_void_p()
    size = ctypes.c_uint64
    _check(
        _library().cublasLtMatrixLayoutCreate(ctypes.byref(layout), DATA_TYPES[dtype.name], size(rows), size(columns), ctypes.c_int64(rows))
    )
    return layout


def _check(status: int) -> None:
    if status:
        raise BackendUnavailable(f"cuBLASLt fails (status {status}).", "dcnr doctor says what is wrong with the GPU")


@functools.cache
def _library() -> ctypes.CDLL:
    return load_library("cublasLt", REMEDY)
