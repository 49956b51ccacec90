"""The `Backend` of NVIDIA GPUs: one method per operation, each a call into the file of its family.

Rule 1: everything is issued to one stream, in order; only `to_host`, `Fetch.wait`, `synchronize` and what returns numbers to the host wait.
Rule 2: storage may be 16 bits wide, arithmetic is float32; what the hardware cannot store is refused when the array is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcnr.backends.base import (
    Activation,
    AdamStep,
    DeviceMemory,
    Fetch,
    HostArray,
    Philox,
    Precision,
    Recording,
    Rope,
    SgdStep,
    StepEnd,
    Trained,
)  # fmt: skip
from dcnr.backends.cupy import activation, arrays, attention, cost, embedding, linear, norm, optimizer, random, rotary, unfused
from dcnr.backends.cupy.array import DeviceArray, Dtype
from dcnr.backends.cupy.device import Device
from dcnr.backends.dtypes import dtype_of, precision_of
from dcnr.errors import BackendUnavailable

BF16_CAPABILITY = 80


class CupyBackend:
    """Kernels of ours and cuBLASLt on one device."""

    name = "cupy"
    runs_shards = False
    wide_caches = False

    def __init__(self, device: Device, fused_attention: bool = True, fused_lm_head: bool = True) -> None:
        """The switches turn the fast paths off, to find out whether an error is theirs."""
        self._device = device
        self._fused_attention = fused_attention
        self._fused_lm_head = fused_lm_head

    @property
    def device(self) -> str:
        return self._device.name

    def memory(self) -> DeviceMemory:
        return self._device.memory()

    def synchronize(self) -> None:
        self._device.synchronize()

    def _storage(self, precision: Precision) -> Dtype:
        """The dtype that stores `precision`. Raises `BackendUnavailable` for what this device cannot store."""
        if precision == "float64":
            raise BackendUnavailable("The cupy backend does not store float64.", "Use float32, or the numpy backend.")
        if precision == "bfloat16" and self._device.capability < BF16_CAPABILITY:
            raise BackendUnavailable(
                f"{self._device.name} has compute capability {self._device.capability / 10}, bfloat16 needs {BF16_CAPABILITY / 10}.",
                "Use float16.",
            )
        return dtype_of(precision)

    # -- numbers that change from step to step ------------------------------------------------------------------------

    def scalar(self, value: float) -> DeviceArray:
        return arrays.scalar(self._device, value)

    def set_scalars(self, scalars: Sequence[DeviceArray], values: Sequence[float]) -> Sequence[DeviceArray]:
        arrays.set_scalars(self._device, scalars, values)
        return scalars

    def fetch(self, arrays: Sequence[DeviceArray]) -> Fetch:
        return self._device.fetch(arrays)

    # -- arrays ---------------------------------------------------------------------------------------------------

    def from_host(self, x: HostArray, precision: Precision | None = None) -> DeviceArray:
        if precision is None and x.dtype.kind not in "iu" and x.dtype.itemsize < 8:
            precision = precision_of(x.dtype)
        return arrays.from_host(self._device, x, self._storage(precision or "float32"))

    def to_host(self, x: DeviceArray) -> HostArray:
        return arrays.to_host(self._device, x)

    def empty(self, shape: tuple[int, ...], precision: Precision) -> DeviceArray:
        return self._device.empty(shape, self._storage(precision))

    def zeros(self, shape: tuple[int, ...], precision: Precision) -> DeviceArray:
        return arrays.zeros(self._device, shape, self._storage(precision))

    def cast(self, x: DeviceArray, precision: Precision) -> DeviceArray:
        return arrays.cast(self._device, x, self._storage(precision))

    def copy_into(self, into: DeviceArray, x: DeviceArray) -> None:
        arrays.copy_into(self._device, into, x)

    def concatenate(self, parts: Sequence[DeviceArray], axis: int) -> DeviceArray:
        return arrays.concatenate(self._device, parts, axis)

    def split(self, x: DeviceArray, sizes: Sequence[int], axis: int) -> tuple[DeviceArray, ...]:
        return arrays.split(self._device, x, sizes, axis)

    # -- products -------------------------------------------------------------------------------------------------

    def linear(
        self, x_RI: DeviceArray, w_OI: DeviceArray, b_O: DeviceArray | None, activation: Activation | None = None
    ) -> tuple[DeviceArray, DeviceArray | None]:
        return linear.linear(self._device, x_RI, w_OI, b_O, activation)

    def linear_backward(
        self, dy_RO: DeviceArray, x_RI: DeviceArray, w_OI: DeviceArray, b_O: DeviceArray | None, pre_RO: DeviceArray | None,
        activation: Activation | None, into_w: DeviceArray, into_b: DeviceArray | None, accumulate: bool, need_dx: bool,
    ) -> DeviceArray | None:  # fmt: skip
        return linear.linear_backward(self._device, dy_RO, x_RI, w_OI, b_O, pre_RO, activation, into_w, into_b, accumulate, need_dx)

    # -- pointwise ------------------------------------------------------------------------------------------------

    def activate(self, kind: Activation, x: DeviceArray) -> DeviceArray:
        return activation.activate(self._device, kind, x)

    def activate_backward(self, kind: Activation, dy: DeviceArray, x: DeviceArray) -> DeviceArray:
        return activation.activate_backward(self._device, kind, dy, x)

    def add(self, terms: Sequence[DeviceArray]) -> DeviceArray:
        return arrays.add(self._device, terms)

    def dropout(self, x: DeviceArray, rate: float, rng: Philox, residual: DeviceArray | None = None) -> DeviceArray:
        return random.dropout(self._device, x, rate, rng, residual)

    def random_mask(self, x: DeviceArray, rate: float, rng: Philox) -> DeviceArray:
        return random.random_mask(self._device, x, rate, rng)

    def rotate(self, x_BTD: DeviceArray, rope: Rope, backward: bool = False) -> DeviceArray:
        return rotary.rotate(self._device, x_BTD, rope, backward)

    def causal_mask(self, x: DeviceArray, fill: float) -> DeviceArray:
        return arrays.causal_mask(self._device, x, fill)

    # -- layers ---------------------------------------------------------------------------------------------------

    def layernorm(
        self, x_RD: DeviceArray, g_D: DeviceArray, b_D: DeviceArray | None, eps: float
    ) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
        return norm.layernorm(self._device, x_RD, g_D, b_D, eps)

    def layernorm_backward(
        self, dy_RD: DeviceArray, x_RD: DeviceArray, g_D: DeviceArray, mean_R: DeviceArray, rstd_R: DeviceArray,
        into_g: DeviceArray, into_b: DeviceArray | None, accumulate: bool,
    ) -> DeviceArray:  # fmt: skip
        return norm.layernorm_backward(self._device, dy_RD, x_RD, g_D, mean_R, rstd_R, into_g, into_b, accumulate)

    def residual_norm(
        self, x_RD: DeviceArray, bias_D: DeviceArray | None, residual_RD: DeviceArray, rate: float, rng: Philox | None,
        g_D: DeviceArray, b_D: DeviceArray | None, eps: float,
    ) -> tuple[DeviceArray, DeviceArray, DeviceArray, DeviceArray]:  # fmt: skip
        return norm.residual_norm(self._device, x_RD, bias_D, residual_RD, rate, rng, g_D, b_D, eps)

    def residual_norm_backward(
        self, dy_RD: DeviceArray, dsum_RD: DeviceArray | None, sum_RD: DeviceArray, rate: float, rng: Philox | None,
        g_D: DeviceArray, mean_R: DeviceArray, rstd_R: DeviceArray,
        into_bias: DeviceArray | None, into_g: DeviceArray, into_b: DeviceArray | None, accumulate: bool,
    ) -> tuple[DeviceArray, DeviceArray]:  # fmt: skip
        return norm.residual_norm_backward(
            self._device, dy_RD, dsum_RD, sum_RD, rate, rng, g_D, mean_R, rstd_R, into_bias, into_g, into_b, accumulate
        )

    def embedding(self, ids_BT: DeviceArray, w_VD: DeviceArray, positions_TD: DeviceArray | None, precision: Precision) -> DeviceArray:
        self._storage(precision)
        return embedding.embedding(self._device, ids_BT, w_VD, positions_TD, precision)

    def embedding_backward(
        self, dy_BTD: DeviceArray, ids_BT: DeviceArray, into_w: DeviceArray, into_positions: DeviceArray | None, accumulate: bool
    ) -> None:
        embedding.embedding_backward(self._device, dy_BTD, ids_BT, into_w, into_positions, accumulate)

    def attention(
        self, qkv_BTF: DeviceArray, bias_F: DeviceArray | None, heads: int, causal: bool, rope: Rope | None
    ) -> tuple[DeviceArray, tuple[DeviceArray, ...]]:
        return attention.attention(self._device, qkv_BTF, bias_F, heads, causal, rope, self._fused_attention)

    def attention_cached(
        self, qkv_BTF: DeviceArray, bias_F: DeviceArray | None, heads: int, rope: Rope | None, into_BSE: DeviceArray, first: int
    ) -> DeviceArray:
        return attention.attention_cached(self._device, qkv_BTF, bias_F, heads, rope, into_BSE, first)

    def attention_backward(
        self, do_BTD: DeviceArray, o_BTD: DeviceArray, bias_F: DeviceArray | None, saved: tuple[DeviceArray, ...], heads: int,
        causal: bool, rope: Rope | None, into_bias: DeviceArray | None, accumulate: bool,
    ) -> DeviceArray:  # fmt: skip
        return attention.attention_backward(
            self._device, do_BTD, o_BTD, bias_F, saved, heads, causal, rope, into_bias, accumulate, self._fused_attention
        )

    # -- costs ----------------------------------------------------------------------------------------------------

    def cross_entropy(
        self, logits_RV: DeviceArray, targets_R: DeviceArray, weight: DeviceArray, grad_scale: DeviceArray
    ) -> tuple[DeviceArray, DeviceArray]:
        return cost.cross_entropy(self._device, logits_RV, targets_R, weight, grad_scale)

    def cross_entropy_of_probabilities(
        self, p_RV: DeviceArray, targets_R: DeviceArray, weight: DeviceArray, grad_scale: DeviceArray
    ) -> tuple[DeviceArray, DeviceArray]:
        return cost.cross_entropy_of_probabilities(self._device, p_RV, targets_R, weight, grad_scale)

    def mean_squared_error(
        self, x: DeviceArray, target: DeviceArray, weight: DeviceArray, grad_scale: DeviceArray
    ) -> tuple[DeviceArray, DeviceArray]:
        return cost.mean_squared_error(self._device, x, target, weight, grad_scale)

    def lm_head_cross_entropy(
        self, x_RD: DeviceArray, w_VD: DeviceArray, b_V: DeviceArray | None, targets_R: DeviceArray,
        weight: DeviceArray, grad_scale: DeviceArray, into_w: DeviceArray | None, into_b: DeviceArray | None, accumulate: bool,
    ) -> tuple[DeviceArray, DeviceArray | None]:  # fmt: skip
        whole = cost.lm_head_cross_entropy if self._fused_lm_head else unfused.lm_head_cross_entropy
        return whole(self._device, x_RD, w_VD, b_V, targets_R, weight, grad_scale, into_w, into_b, accumulate)

    # -- optimizer ------------------------------------------------------------------------------------------------

    def fold_shards(self, grads_SN: DeviceArray) -> tuple[float, bool]:
        return optimizer.fold_shards(self._device, grads_SN)

    def step_end(self, trained: Sequence[Trained], groups: Sequence[int], loss_scale: DeviceArray) -> StepEnd:
        return optimizer.StepEnd(self._device, trained, groups, loss_scale)

    def ipc(self) -> Any | None:
        return self._device.ipc()

    def recording(self, beside: Recording | None = None) -> Recording:
        return self._device.recording(beside)

    def add_into(self, into: DeviceArray, x: DeviceArray) -> None:
        arrays.add_into(self._device, into, x)

    def adam(self, step: AdamStep, w: DeviceArray, g: DeviceArray, m: DeviceArray, v: DeviceArray, low: DeviceArray | None) -> None:
        optimizer.adam(self._device, step, w, g, m, v, low)

    def sgd(self, step: SgdStep, w: DeviceArray, g: DeviceArray, m: DeviceArray | None, low: DeviceArray | None) -> None:
        optimizer.sgd(self._device, step, w, g, m, low)
