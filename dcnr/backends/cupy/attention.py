"""Softmax attention that never holds [T, T]: which kernels run, and what they get.

Three ways, one interface (`attention.cuh` says what the arrays are): `attention_hopper` (compute capability 9.0), `attention_mma` (8.0 and
later), `attention_simt` (any GPU, any dtype; also when the fused ways are switched off). q and k get their bias and their rotation in
place, in a kernel of their own; v stays as it came: its bias is added to the output, since the weights of a row sum to 1.
Generation has a kernel of its own, `attention_cached`, over keys and values that are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dcnr.backends.base import HostArray, Rope
from dcnr.backends.cupy.array import FLOAT32, DeviceArray
from dcnr.backends.cupy.arrays import group
from dcnr.backends.cupy.columns import no_rows, reduce_columns
from dcnr.backends.cupy.device import Argument, Device, blocks, parameter, storage
from dcnr.errors import BackendUnavailable

HOPPER_DIMS = (64, 128)
MMA_DIMS = (32, 64, 96, 128)
LARGEST_DIM = 256
TILE = 64
"""Rows of log-sum-exps come in multiples of it."""


class Way(NamedTuple):
    """The kernels of one source, and how they are launched."""

    source: str
    rows: int
    """Positions of a block."""
    threads: int
    shared: Mapping[str, int]
    """Bytes that each kernel takes."""


class Shape(NamedTuple):
    """Of one call: batch B, positions T, heads, head_dim."""

    batch: int
    length: int
    heads: int
    head_dim: int

    @property
    def padded(self) -> tuple[int, int]:
        """Shape of log-sum-exps: a row per head of each sequence."""
        return self.batch * self.heads, blocks(self.length, TILE) * TILE


def attention(
    device: Device, qkv_BTF: DeviceArray, bias_F: DeviceArray | None, heads: int, causal: bool, rope: Rope | None, fused: bool = True
) -> tuple[DeviceArray, tuple[DeviceArray, ...]]:
    """See `Backend.attention`; saves (qkv as attention reads it, the log-sum-exp of each row in the log2 domain)."""
    shape = _shape(qkv_BTF, heads)
    o_BTD = device.empty((*qkv_BTF.shape[:-1], heads * shape.head_dim), qkv_BTF.dtype)
    lse = device.empty(shape.padded, FLOAT32)
    if qkv_BTF.size:
        way = _way(device, qkv_BTF, shape, fused)
        _turn(device, qkv_BTF, bias_F, shape, rope)
        source = _maps(device, way, shape, (qkv_BTF,)) or (qkv_BTF,)
        defines = *_defines(shape, qkv_BTF, bias_F), f"CAUSAL={int(causal)}"
        _run(device, way, "attention", shape, defines, (*source, o_BTD, lse, bias_F))
    return o_BTD, (qkv_BTF, lse)


def attention_cached(
    device: Device, qkv_BTF: DeviceArray, bias_F: DeviceArray | None, heads: int, rope: Rope | None, into_BSE: DeviceArray, first: int
) -> DeviceArray:
    """See `Backend.attention_cached`."""
    shape = _shape(qkv_BTF, heads)
    o_BTD = device.empty((*qkv_BTF.shape[:-1], heads * shape.head_dim), qkv_BTF.dtype)
    if not qkv_BTF.size:
        return o_BTD
    _check_dim(shape)
    _turn(device, qkv_BTF, bias_F, shape, rope, first)
    defines = _defines(shape, qkv_BTF, bias_F)
    kept, features = into_BSE.shape[1:]
    count = shape.batch * shape.length * features
    places = shape.length, features, kept, first
    device.launch(
        device.kernel("attention_cached", "keep", *defines), (blocks(count, 256), 1), 256,
        (qkv_BTF, into_BSE, bias_F, np.uint64(count), *places),
    )  # fmt: skip
    device.launch(
        device.kernel("attention_cached", "attend", *defines), (shape.batch * shape.length * heads, 1), 256,
        (qkv_BTF, into_BSE, o_BTD, shape.length, heads, kept, first, 1.0 / math.sqrt(shape.head_dim)),
    )  # fmt: skip
    return o_BTD


def attention_backward(
    device: Device, do_BTD: DeviceArray, o_BTD: DeviceArray, bias_F: DeviceArray | None, saved: tuple[DeviceArray, ...], heads: int,
    causal: bool, rope: Rope | None, into_bias: DeviceArray | None, accumulate: bool, fused: bool = True,
) -> DeviceArray:  # fmt: skip
    """See `Backend.attention_backward`. dq first, for it leaves what dk and dv need: the row sums of do * o."""
    qkv_BTF, lse = saved
    shape = _shape(qkv_BTF, heads)
    dqkv_BTF = device.empty(qkv_BTF.shape, do_BTD.dtype)
    if not qkv_BTF.size:
        no_rows(device, [into_bias], accumulate)
        return dqkv_BTF
    way = _way(device, qkv_BTF, shape, fused)
    turns = _turns(device, rope, shape)
    delta = device.empty(shape.padded, FLOAT32)
    parts = None if into_bias is None else device.empty((shape.batch * blocks(shape.length, way.rows), qkv_BTF.shape[-1]), FLOAT32)
    source = _maps(device, way, shape, (qkv_BTF, do_BTD))
    for_dq = (*(source or (qkv_BTF,)), o_BTD, do_BTD, bias_F, lse, delta, turns, dqkv_BTF, parts)
    for_dkv = (*(source or (qkv_BTF, do_BTD)), lse, delta, turns, dqkv_BTF, parts)
    defines = *_defines(shape, qkv_BTF, bias_F), f"CAUSAL={int(causal)}"
    _run(device, way, "attention_dq", shape, defines, for_dq)
    _run(device, way, "attention_dkv", shape, defines, for_dkv)
    if parts is not None:
        reduce_columns(device, parts, [into_bias], accumulate)
    return dqkv_BTF


def _shape(qkv_BTF: DeviceArray, heads: int) -> Shape:
    batch, length, features = qkv_BTF.shape
    return Shape(batch, length, heads, features // (3 * heads))


def _way(device: Device, qkv_BTF: DeviceArray, shape: Shape, fused: bool) -> Way:
    head_dim = shape.head_dim
    fast = fused and qkv_BTF.dtype.itemsize == 2 and device.capability >= 80
    if fast and device.capability == 90 and head_dim in HOPPER_DIMS:
        return _hopper(TILE * head_dim * 2)
    if fast and head_dim in MMA_DIMS:
        return _mma(head_dim)
    _check_dim(shape)
    rows, threads = (32, 256) if head_dim <= 64 else (16, 256) if head_dim <= 160 else (8, 64)
    return Way("attention_simt", rows, threads, _shared(0, 0, 0))


def _check_dim(shape: Shape) -> None:
    if shape.head_dim > LARGEST_DIM:
        raise BackendUnavailable(
            f"Attention on a GPU takes heads of at most {LARGEST_DIM} numbers, this one has {shape.head_dim}.",
            "Use more heads, or another backend.",
        )


def _hopper(tile: int) -> Way:
    slack = 1024 + 64  # tiles start at multiples of 1,024 bytes; two barriers
    return Way("attention_hopper", TILE, 128, _shared(5 * tile + slack, 6 * tile + slack, 6 * tile + slack + 1024))


def _mma(head_dim: int) -> Way:
    row, side, back = head_dim * 2, 64 if head_dim <= 64 else 32, 32 if head_dim <= 96 else 16  # bytes; rows of a tile of the other side
    own, others, back_others = TILE * row, 4 * side * row, 4 * back * row  # two stages of two tiles
    return Way("attention_mma", TILE, 128, _shared(own + others, 2 * own + back_others, 2 * own + back_others + 16 * back))


def _shared(forward: int, dq: int, dkv: int) -> Mapping[str, int]:
    return {"attention": forward, "attention_dq": dq, "attention_dkv": dkv}


def _run(device: Device, way: Way, name: str, shape: Shape, defines: Sequence[str], args: Sequence[Argument]) -> None:
    grid = blocks(shape.length, way.rows) * shape.batch * shape.heads, 1
    scale = 1.0 / math.sqrt(shape.head_dim)
    kernel = device.kernel(way.source, name, *defines)
    device.launch(kernel, grid, way.threads, (*args, shape.length, shape.heads, scale), way.shared[name])


def _defines(shape: Shape, qkv_BTF: DeviceArray, bias_F: DeviceArray | None) -> tuple[str, ...]:
    return f"HEAD_DIM={shape.head_dim}", storage(qkv_BTF.dtype), parameter((bias_F or qkv_BTF).dtype)


def _maps(device: Device, way: Way, shape: Shape, arrays: Sequence[DeviceArray]) -> tuple[bytes, ...]:
    """Tensor maps of [B, T, heads of q, k and v or of o, head_dim] for the kernels that load by TMA: a tile is 64 columns of 64 rows."""
    if way.source != "attention_hopper":
        return ()
    maps = []
    for array in arrays:
        row = array.shape[-1]
        dims = shape.head_dim, row // shape.head_dim, shape.length, shape.batch
        strides = 2 * shape.head_dim, 2 * row, 2 * row * shape.length
        maps.append(device.tensor_map(array, dims, strides, (64, 1, TILE, 1)))
    return tuple(maps)


def _turn(device: Device, qkv_BTF: DeviceArray, bias_F: DeviceArray | None, shape: Shape, rope: Rope | None, first: int = 0) -> None:
    """Bias and rotation of q and k, in place; `first` is the position of the first row."""
    if rope is None and bias_F is None:
        return
    size = group(qkv_BTF, *[bias_F] if bias_F else [], width=shape.head_dim)
    kernel = device.kernel("attention_rope", "turn", *_defines(shape, qkv_BTF, bias_F), f"GROUP={size}")
    rows = shape.batch * shape.length
    grid = blocks(rows * 2 * shape.heads * blocks(shape.head_dim, max(size, 2)), 256), 1
    turns = _turns(device, rope, shape._replace(length=first + shape.length))
    args = (qkv_BTF, turns and turns[first:], bias_F, np.uint64(rows), shape.length, shape.heads)
    device.launch(kernel, grid, 256, args)


def _turns(device: Device, rope: Rope | None, shape: Shape) -> DeviceArray | None:
    """cos and sin of every position's angles, for a power of two of positions: few tables, however lengths vary."""
    if rope is None:
        return None
    what = rope.theta, shape.head_dim, 1 << (max(shape.length, TILE) - 1).bit_length()
    return device.constant(("turns", *what), lambda: _table(*what))


def _table(theta: float, head_dim: int, positions: int) -> HostArray:
    """[positions, head_dim / 2, 2]."""
    angles = np.outer(np.arange(positions), theta ** (-np.arange(0, head_dim, 2) / head_dim))
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
