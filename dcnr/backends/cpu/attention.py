"""Softmax attention: batched OpenBLAS products over [B, H] straight on strided views of qkv, and a softmax kernel.

The views need no gather and no scatter: NumPy hands OpenBLAS the row stride. Bias and rotary embedding are done in place.
Softmax and its backward touch the causal half only. Shape suffixes: B rows, T positions, H heads, D head width, Z = B * H.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dcnr.backends.base import Rope
from dcnr.backends.cpu.activation import add_bias, column_sums
from dcnr.backends.cpu.casts import narrow, wide
from dcnr.backends.cpu.embedding import rotate_kernel, turns
from dcnr.backends.cpu.functions import F4, exp, largest
from dcnr.backends.cpu.jit import inner, kernel
from dcnr.backends.cpu.pool import Pool

Floats = npt.NDArray[Any]

RUN = 32
"""Rows of the causal half are computed up to a multiple of this, for the vector loops have no remainder then."""


@inner
def softmax_row(s: Floats, seen: int, scale: np.float32) -> None:
    """s = softmax(scale * s) of a run whose first `seen` columns count."""
    s[seen:] = F4(-np.inf)
    top = largest(s)
    for j in range(s.size):
        s[j] = exp((s[j] - top) * scale)
    total = F4(0)
    for j in range(s.size):
        total += s[j]
    factor = F4(1) / total
    for j in range(s.size):
        s[j] *= factor


@inner
def softmax_back_row(p: Floats, ds: Floats, scale: np.float32) -> None:
    """ds = scale * p * (dp - p . dp), where ds holds dp at first."""
    dot = F4(0)
    for j in range(p.size):
        dot += p[j] * ds[j]
    for j in range(p.size):
        ds[j] = p[j] * (ds[j] - dot) * scale


@kernel("void(f4[:,:,::1], f8, b1)")
def softmax_kernel(s_ZTT: Floats, scale: float, causal: bool) -> None:
    positions = s_ZTT.shape[1]
    for z in range(s_ZTT.shape[0]):
        for i in range(positions):
            seen = i + 1 if causal else positions
            run = min(positions, (seen + RUN - 1) // RUN * RUN)
            softmax_row(s_ZTT[z, i, :run], seen, F4(scale))
            s_ZTT[z, i, run:] = F4(0)


@kernel("void(f4[:,:,::1], i8, f8)")
def softmax_cached_kernel(s_ZTS: Floats, first: int, scale: float) -> None:
    """Row i is of position first + i."""
    positions = s_ZTS.shape[2]
    for z in range(s_ZTS.shape[0]):
        for i in range(s_ZTS.shape[1]):
            seen = first + i + 1
            run = min(positions, (seen + RUN - 1) // RUN * RUN)
            softmax_row(s_ZTS[z, i, :run], seen, F4(scale))
            s_ZTS[z, i, run:] = F4(0)


@kernel("void(f4[:,:,::1], f4[:,:,::1], f8, b1)")
def softmax_backward_kernel(p_ZTT: Floats, ds_ZTT: Floats, scale: float, causal: bool) -> None:
    positions = p_ZTT.shape[1]
    for z in range(p_ZTT.shape[0]):
        for i in range(positions):
            run = min(positions, (i + RUN) // RUN * RUN) if causal else positions
            softmax_back_row(p_ZTT[z, i, :run], ds_ZTT[z, i, :run], F4(scale))
            ds_ZTT[z, i, run:] = F4(0)


def heads_of(x_BTF: Floats, parts: int, heads: int) -> Floats:
    """The view [parts, B, H, T, D] of columns that hold, part after part, head after head."""
    rows, positions, columns = x_BTF.shape
    return x_BTF.reshape(rows, positions, parts, heads, columns // (parts * heads)).transpose(2, 0, 3, 1, 4)


def attention(
    pool: Pool, qkv: Floats, bias_F: Floats | None, heads: int, causal: bool, rope: Rope | None
) -> tuple[Floats, tuple[Floats, ...]]:
    """See `Backend.attention`. Keeps float32 qkv with its bias, q and k turned, and the probabilities [B, H, T, T]."""
    rows, positions, columns = qkv.shape
    width = columns // (3 * heads)
    x_BTF = turned(pool, qkv, bias_F, heads, rope)
    q, k, v = heads_of(x_BTF, 3, heads)
    p = pool.empty((rows, heads, positions, positions))
    np.matmul(q, k.swapaxes(2, 3), out=p)
    softmax_kernel(p.reshape(-1, positions, positions), 1.0 / math.sqrt(width), causal)
    o = pool.empty((rows, positions, heads * width))
    np.matmul(p, v, out=heads_of(o, 1, heads)[0])
    return narrow(pool, o, qkv.dtype), (x_BTF, p)


def attention_cached(pool: Pool, qkv: Floats, bias_F: Floats | None, heads: int, rope: Rope | None, into_BSE: Floats, first: int) -> Floats:
    """See `Backend.attention_cached`."""
    rows, positions, columns = qkv.shape
    width, seen = columns // (3 * heads), first + positions
    x_BTF = turned(pool, qkv, bias_F, heads, None if rope is None else rope._replace(first=first))
    into_BSE[:, first:seen] = x_BTF[:, :, columns // 3 :]
    q = heads_of(x_BTF, 3, heads)[0]
    k, v = heads_of(wide(pool, into_BSE[:, :seen]), 2, heads)
    p = pool.empty((rows, heads, positions, seen))
    np.matmul(q, k.swapaxes(2, 3), out=p)
    softmax_cached_kernel(p.reshape(-1, positions, seen), first, 1.0 / math.sqrt(width))
    o = pool.empty((rows, positions, heads * width))
    np.matmul(p, v, out=heads_of(o, 1, heads)[0])
    return narrow(pool, o, qkv.dtype)


def turned(pool: Pool, qkv: Floats, bias_F: Floats | None, heads: int, rope: Rope | None) -> Floats:
    """float32 qkv with its bias, q and k turned; in place where it is float32 already."""
    x_BTF = wide(pool, qkv)
    flat = x_BTF.reshape(-1, x_BTF.shape[-1])
    if bias_F is not None:
        add_bias(flat, wide(pool, bias_F))
    if rope is not None:
        cos, sin = turns(rope, x_BTF.shape[1], flat.shape[1] // (3 * heads), False)
        rotate_kernel(flat, cos, sin, 2 * heads, flat)
    return x_BTF


def attention_backward(
    pool: Pool,
    do: Floats,
    saved: tuple[Floats, ...],
    heads: int,
    causal: bool,
    rope: Rope | None,
    into_bias: Floats | None,
    accumulate: bool,
) -> Floats:
    """See `Backend.attention_backward`."""
    x_BTF, p = saved
    _, positions, columns = x_BTF.shape
    width = columns // (3 * heads)
    q, k, v = heads_of(x_BTF, 3, heads)
    g = heads_of(wide(pool, do), 1, heads)[0]
    dqkv = pool.empty(x_BTF.shape)
    dq, dk, dv = heads_of(dqkv, 3, heads)
    ds = pool.empty(p.shape)
    np.matmul(p.swapaxes(2, 3), g, out=dv)
    np.matmul(g, v.swapaxes(2, 3), out=ds)
    shape = (-1, positions, positions)
    softmax_backward_kernel(p.reshape(shape), ds.reshape(shape), 1.0 / math.sqrt(width), causal)
    np.matmul(ds, k, out=dq)
    np.matmul(ds.swapaxes(2, 3), q, out=dk)
    flat = dqkv.reshape(-1, columns)
    if rope is not None:
        cos, sin = turns(rope, positions, width, True)
        rotate_kernel(flat, cos, sin, 2 * heads, flat)
    if into_bias is not None:
        column_sums(flat, into_bias, accumulate)
    return narrow(pool, dqkv, do.dtype)
