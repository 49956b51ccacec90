"""The `Backend` of CPUs: one method per operation, each a call into the file of its family.

Rule 1: the caller's threads are the only threads; OpenBLAS has one per call. Everything here is safe from several threads.
Rule 2: storage may be 16 bits wide, arithmetic is float32: operations widen at their border and round once at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dcnr.backends.base import Activation, AdamStep, DeviceMemory, Philox, Precision, Rope, Scalar, SgdStep
from dcnr.backends.blas import limit_blas
from dcnr.backends.cpu import activation, arrays, attention, casts, cost, embedding, linear, norm, optimizer, random
from dcnr.backends.cpu.pool import Pool, total_memory
from dcnr.backends.dtypes import dtype_of
from dcnr.backends.host import HostFetch, HostOps
from dcnr.errors import BackendUnavailable

Array = npt.NDArray[Any]


def storage(precision: Precision) -> np.dtype[Any]:
    """The dtype that stores `precision`. Raises `BackendUnavailable` for float64."""
    if precision == "float64":
        raise BackendUnavailable("The cpu backend does not store float64.", "Use float32, or the numpy backend.")
    return dtype_of(precision)


class CpuBackend(HostOps):
    """OpenBLAS products and Numba kernels on pooled memory."""

    name = "cpu"
    runs_shards = True
    wide_caches = True

    def __init__(self) -> None:
        limit_blas()
        self._pool = Pool()
        self._copies = Pool()
        """Of checkpoints: they are no working memory, and the next one goes where the last one was."""

    def memory(self) -> DeviceMemory:
        return DeviceMemory(total_memory(), self._pool.held)

    def fetch(self, arrays: Sequence[Array | Scalar]) -> HostFetch:
        return HostFetch([casts.copy_of(self._copies, x) if isinstance(x, np.ndarray) else np.array(x) for x in arrays])

    # -- arrays ---------------------------------------------------------------------------------------------------

    def from_host(self, x: Array, precision: Precision | None = None) -> Array:
        if x.dtype.kind in "iu":
            return x.astype(np.int64)
        y = self._pool.empty(x.shape, x.dtype if precision is None and x.dtype.itemsize < 8 else storage(precision or "float32"))
        casts.copy_into(self._pool, y, x.astype(np.float32) if x.dtype.itemsize > 4 else x)
        return y

    def to_host(self, x: Array) -> Array:
        return x

    def empty(self, shape: tuple[int, ...], precision: Precision) -> Array:
        return self._pool.empty(shape, storage(precision))

    def zeros(self, shape: tuple[int, ...], precision: Precision) -> Array:
        x = self._pool.empty(shape, storage(precision))
        x.fill(0)
        return x

    def cast(self, x: Array, precision: Precision) -> Array:
        return casts.cast(self._pool, x, storage(precision))

    def copy_into(self, into: Array, x: Array) -> None:
        casts.copy_into(self._pool, into, x)

    def concatenate(self, parts: Sequence[Array], axis: int) -> Array:
        return arrays.concatenate(self._pool, parts, axis)

    def split(self, x: Array, sizes: Sequence[int], axis: int) -> tuple[Array, ...]:
        return arrays.split(self._pool, x, sizes, axis)

    # -- products -------------------------------------------------------------------------------------------------

    def linear(self, x_RI: Array, w_OI: Array, b_O: Array | None, activation: Activation | None = None) -> tuple[Array, Array | None]:
        return linear.linear(self._pool, x_RI, w_OI, b_O, activation)

    def linear_backward(
        self, dy_RO: Array, x_RI: Array, w_OI: Array, b_O: Array | None, pre_RO: Array | None, activation: Activation | None,
        into_w: Array, into_b: Array | None, accumulate: bool, need_dx: bool,
    ) -> Array | None:  # fmt: skip
        return linear.linear_backward(self._pool, dy_RO, x_RI, w_OI, pre_RO, activation, into_w, into_b, accumulate, need_dx)

    # -- pointwise ------------------------------------------------------------------------------------------------

    def activate(self, kind: Activation, x: Array) -> Array:
        return activation.activate(self._pool, kind, x)

    def activate_backward(self, kind: Activation, dy: Array, x: Array) -> Array:
        return activation.activate_backward(self._pool, kind, dy, x)

    def add(self, terms: Sequence[Array]) -> Array:
        return arrays.add(self._pool, terms)

    def dropout(self, x: Array, rate: float, rng: Philox, residual: Array | None = None) -> Array:
        return random.dropout(self._pool, x, rate, rng, residual)

    def random_mask(self, x: Array, rate: float, rng: Philox) -> Array:
        return random.keep(self._pool, x, rate, 1.0, rng, None)

    def rotate(self, x_BTD: Array, rope: Rope, backward: bool = False) -> Array:
        return embedding.rotate(self._pool, x_BTD, rope, backward)

    def causal_mask(self, x: Array, fill: float) -> Array:
        return arrays.causal_mask(self._pool, x, fill)

    # -- layers ---------------------------------------------------------------------------------------------------

    def layernorm(self, x_RD: Array, g_D: Array, b_D: Array | None, eps: float) -> tuple[Array, Array, Array]:
        return norm.layernorm(self._pool, x_RD, g_D, b_D, eps)

    def layernorm_backward(
        self, dy_RD: Array, x_RD: Array, g_D: Array, mean_R: Array, rstd_R: Array,
        into_g: Array, into_b: Array | None, accumulate: bool,
    ) -> Array:  # fmt: skip
        return norm.layernorm_backward(self._pool, dy_RD, x_RD, g_D, mean_R, rstd_R, into_g, into_b, accumulate)

    def residual_norm(
        self, x_RD: Array, bias_D: Array | None, residual_RD: Array, rate: float, rng: Philox | None,
        g_D: Array, b_D: Array | None, eps: float,
    ) -> tuple[Array, Array, Array, Array]:  # fmt: skip
        return norm.residual_norm(self._pool, x_RD, bias_D, residual_RD, rate, rng, g_D, b_D, eps)

    def residual_norm_backward(
        self, dy_RD: Array, dsum_RD: Array | None, sum_RD: Array, rate: float, rng: Philox | None,
        g_D: Array, mean_R: Array, rstd_R: Array, into_bias: Array | None, into_g: Array, into_b: Array | None, accumulate: bool,
    ) -> tuple[Array, Array]:  # fmt: skip
        return norm.residual_norm_backward(
            self._pool, dy_RD, dsum_RD, sum_RD, rate, rng, g_D, mean_R, rstd_R, into_bias, into_g, into_b, accumulate
        )

    def embedding(self, ids_BT: Array, w_VD: Array, positions_TD: Array | None, precision: Precision) -> Array:
        return embedding.embedding(self._pool, ids_BT, w_VD, positions_TD, storage(precision))

    def embedding_backward(self, dy_BTD: Array, ids_BT: Array, into_w: Array, into_positions: Array | None, accumulate: bool) -> None:
        embedding.embedding_backward(self._pool, dy_BTD, ids_BT, into_w, into_positions, accumulate)

    def attention(
        self, qkv_BTF: Array, bias_F: Array | None, heads: int, causal: bool, rope: Rope | None
    ) -> tuple[Array, tuple[Array, ...]]:
        return attention.attention(self._pool, qkv_BTF, bias_F, heads, causal, rope)

    def attention_cached(self, qkv_BTF: Array, bias_F: Array | None, heads: int, rope: Rope | None, into_BSE: Array, first: int) -> Array:
        return attention.attention_cached(self._pool, qkv_BTF, bias_F, heads, rope, into_BSE, first)

    def attention_backward(
        self, do_BTD: Array, o_BTD: Array, bias_F: Array | None, saved: tuple[Array, ...], heads: int, causal: bool, rope: Rope | None,
        into_bias: Array | None, accumulate: bool,
    ) -> Array:  # fmt: skip
        return attention.attention_backward(self._pool, do_BTD, saved, heads, causal, rope, into_bias, accumulate)

    # -- costs ----------------------------------------------------------------------------------------------------

    def cross_entropy(self, logits_RV: Array, targets_R: Array, weight: Scalar, grad_scale: Scalar) -> tuple[Scalar, Array]:
        return cost.cross_entropy(self._pool, logits_RV, targets_R, weight, grad_scale)

    def cross_entropy_of_probabilities(self, p_RV: Array, targets_R: Array, weight: Scalar, grad_scale: Scalar) -> tuple[Scalar, Array]:
        return cost.cross_entropy_of_probabilities(self._pool, p_RV, targets_R, weight, grad_scale)

    def mean_squared_error(self, x: Array, target: Array, weight: Scalar, grad_scale: Scalar) -> tuple[Scalar, Array]:
        return cost.mean_squared_error(self._pool, x, target, weight, grad_scale)

    def lm_head_cross_entropy(
        self, x_RD: Array, w_VD: Array, b_V: Array | None, targets_R: Array, weight: Scalar, grad_scale: Scalar,
        into_w: Array | None, into_b: Array | None, accumulate: bool,
    ) -> tuple[Scalar, Array | None]:  # fmt: skip
        return cost.lm_head_cross_entropy(self._pool, x_RD, w_VD, b_V, targets_R, weight, grad_scale, into_w, into_b, accumulate)

    # -- optimizer ------------------------------------------------------------------------------------------------

    def fold_shards(self, grads_SN: Array) -> tuple[float, bool]:
        return optimizer.fold_shards(grads_SN)

    def add_into(self, into: Array, x: Array) -> None:
        optimizer.add_into(into, x)

    def adam(self, step: AdamStep, w: Array, g: Array, m: Array, v: Array, low: Array | None) -> None:
        optimizer.adam(step, w, g, m, v, low)

    def sgd(self, step: SgdStep, w: Array, g: Array, m: Array | None, low: Array | None) -> None:
        optimizer.sgd(step, w, g, m, low)
