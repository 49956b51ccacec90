"""What a backend is: a narrow set of forward/backward pairs on opaque device arrays.

Rule 1: `numpy` is the living definition; every other backend equals it within `tests/tolerances.py`.
Rule 2: arrays are stored as float32, float16 or bfloat16; arithmetic and sums are float32 (`numpy` also takes
float64, for finite differences). An operation returns the dtype of its first array argument unless it says otherwise.
Rule 3: functions are pure: they never write to their inputs, except where an argument is named `into`.
`into` is a float32 gradient accumulator: written when `accumulate` is False, added to when it is True.
Rule 4: same inputs, same bits: no atomics, sums in a fixed order.
Rule 5: what a backend cannot do raises `BackendUnavailable`; nothing falls back to a slow path in silence.

Shape suffixes: B batch rows, T positions, R = product of all leading axes, I inputs, O outputs, D width, V vocabulary,
H heads, F features, S kept positions, E features kept of each, N numbers of elements. Weights are [out, in], as PyTorch stores them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = Any
"""A device array: np.ndarray, cupy.ndarray or mlx.core.array. Has `.shape` and `.dtype`."""

HostArray = npt.NDArray[Any]

Scalar = Any
"""A number that changes from step to step: a Python number, or, on a GPU, one that lies in device memory, so that no step waits
for the host and a recorded pass replays with new ones.
Made by `Backend.scalar`, changed by `Backend.set_scalars`, read by `Backend.fetch`."""

Precision = Literal["float32", "float16", "bfloat16", "float64"]
Activation = Literal["relu", "gelu", "silu", "swiglu"]
"""gelu is the exact one (erf). swiglu halves the last axis: value, gate = split(x); value * silu(gate)."""


class Philox(NamedTuple):
    """Where a random mask comes from: Philox 4x32-10 (Salmon et al. 2011), 16 bits per element.

    key = (seed & 0xffffffff, seed >> 32); `stream` is a 32-bit hash of the node id. Element `e` (its index in the whole batch, so
    that micro-batches and row shards do not change it) has half `e & 7` of the block with counter (c & 0xffffffff, c >> 32, stream, step),
    where c = e >> 3 and half 2w + h of a block is its word w shifted right by 16 h: eight neighbours, one 16-byte vector of
    half-precision numbers, come from one block. An element is kept if its half >= floor(rate * 2**16).
    """

    seed: int
    stream: int
    step: Scalar
    offset: int
    """Index, in the whole batch, of this array's first element."""


class Rope(NamedTuple):
    """Rotary embedding (Su et al. 2021) of neighbouring pairs (2i, 2i+1). `first`: the position of the first row."""

    theta: float
    first: int = 0


class AdamStep(NamedTuple):
    """One AdamW update (Loshchilov & Hutter 2019); weight_decay 0 makes it Adam (Kingma & Ba 2015)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    correction1: float
    """1 - beta1**t"""
    correction2: float
    """1 - beta2**t"""
    grad_factor: float
    """Multiplies the gradient first: clip factor / loss scale."""


class SgdStep(NamedTuple):
    """One SGD update: m = momentum * m + g; w -= lr * (m + weight_decay * w)."""

    lr: float
    momentum: float
    weight_decay: float
    grad_factor: float


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes."""

    total: int
    used: int


class Fetch(Protocol):
    """A copy to the host that is under way."""

    def wait(self) -> list[HostArray]:
        """The arrays, scalars as 0-d ones, once they are there. Any thread may wait; it keeps no other from issuing work."""
        ...


class Recording(Protocol):
    """Work that is issued again and again, in the end as one piece (a CUDA graph)."""

    def run(self, work: Callable[[], None]) -> None:
        """The first time `work` is called, in memory of its own; the second time it is called, recorded and replayed.

        From then on the recording is replayed: it reads and writes the very arrays of the second time.
        """
        ...


class Trained(NamedTuple):
    """One parameter and all that trains it. `gradients` is [S, *shape]; `tied` are accumulators of the same shape that join it."""

    master: Array
    low: Array | None
    gradients: Array
    tied: tuple[Array, ...]
    m: Array | None
    v: Array | None


class StepEnd(Protocol):
    """The end of a step for all parameters of a session at once, without the host: what `Backend.step_end` makes.

    P parameters, in the order in which they were given. K candidates: the updates that this one may be, since the host may not yet
    know how many of the last steps were skipped.
    """

    def measure(self) -> Array:
        """Fold tied gradients, and measure: float64 [P + 1], sums of squares of each parameter, and 1 if all are finite, else 0."""
        ...

    def update(self, steps: Sequence[AdamStep | SgdStep]) -> None:
        """One optimizer step with the given numbers."""
        ...

    def start(self, state: ScalerNumbers) -> None:
        """Set the device's own loss scaler (once, before the first `settle`)."""
        ...

    def settle(self, first_update: int, candidates: Sequence[Sequence[AdamStep | SgdStep]], clip_norm: float) -> Array:
        """Measure, decide and update on the device.

        `candidates[k]` holds the steps of all parameters if this is update `first_update + k`; their `grad_factor` is computed here.
        Returns float64 [6]: updates, loss scale, good steps (all after the step), skipped (0 or 1), gradient norm, loss scale it ran with.
        If this is none of the candidates, nothing is updated and the updates are NaN.
        """
        ...


class ScalerNumbers(NamedTuple):
    """The loss scaler as numbers: `optim.decide.ScalerState`, and what moves it."""

    updates: int
    loss_scale: float
    good_steps: int
    dynamic: bool
    window: int
    min_scale: float
    max_scale: float


class Backend(Protocol):
    """One device. Threads may call it at the same time, each with its own arrays."""

    @property
    def name(self) -> str:
        """`numpy`, `cpu`, `cupy` or `mlx`."""
        ...

    @property
    def device(self) -> str:
        """What it computes on, for people: `NVIDIA H200 (0)`, or the kind of processor."""
        ...

    @property
    def runs_shards(self) -> bool:
        """Whether a micro-batch is cut into row shards that run in threads, and results are there when a call returns (CPU).

        Otherwise it runs whole, and calls only issue work (GPU).
        """
        ...

    @property
    def wide_caches(self) -> bool:
        """Whether `attention_cached` keeps keys and values in float32, because `attention` here rounds none: both are to say the same."""
        ...

    def memory(self) -> DeviceMemory:
        """What the device has and what this process holds."""
        ...

    def synchronize(self) -> None:
        """Wait until everything issued so far is done."""
        ...

    # -- numbers that change from step to step ------------------------------------------------------------------------

    def scalar(self, value: float) -> Scalar:
        """A new one: on a CPU the value itself; on a GPU a 0-d array, 32-bit unsigned for an int, float32 for a float."""
        ...

    def set_scalars(self, scalars: Sequence[Scalar], values: Sequence[float]) -> Sequence[Scalar]:
        """`scalars` with new values, for all work issued from now on: on a GPU the same objects, on a CPU the values themselves."""
        ...

    def fetch(self, arrays: Sequence[Array | Scalar]) -> Fetch:
        """Begin to copy to host memory; work that is issued later may overwrite the arrays without harm."""
        ...

    # -- arrays ---------------------------------------------------------------------------------------------------

    def from_host(self, x: HostArray, precision: Precision | None = None) -> Array:
        """Copy to the device, rounding floats to `precision`; integers stay int64."""
        ...

    def to_host(self, x: Array) -> HostArray:
        """A NumPy array of the same dtype (bfloat16 as ml_dtypes.bfloat16); may share memory."""
        ...

    def empty(self, shape: tuple[int, ...], precision: Precision) -> Array:
        """Uninitialised, from the pool; returns to it when the last reference goes."""
        ...

    def zeros(self, shape: tuple[int, ...], precision: Precision) -> Array:
        """All zero."""
        ...

    def cast(self, x: Array, precision: Precision) -> Array:
        """`x` itself if it has that dtype, else a rounded copy (nearest even)."""
        ...

    def copy_into(self, into: Array, x: Array) -> None:
        """into[...] = x, rounding if dtypes differ; shapes are equal."""
        ...

    def concatenate(self, parts: Sequence[Array], axis: int) -> Array:
        """One array of all `parts`, joined along `axis` (as NumPy counts it)."""
        ...

    def split(self, x: Array, sizes: Sequence[int], axis: int) -> tuple[Array, ...]:
        """The reverse: contiguous copies of consecutive pieces of `x`."""
        ...

    # -- products -------------------------------------------------------------------------------------------------

    def linear(self, x_RI: Array, w_OI: Array, b_O: Array | None, activation: Activation | None = None) -> tuple[Array, Array | None]:
        """y = activation(x w^T + b). Returns (y, pre), `pre` being what the backward of the activation reads; None without one."""
        ...

    def linear_backward(
        self,
        dy_RO: Array,
        x_RI: Array,
        w_OI: Array,
        b_O: Array | None,
        pre_RO: Array | None,
        activation: Activation | None,
        into_w: Array,
        into_b: Array | None,
        accumulate: bool,
        need_dx: bool,
    ) -> Array | None:
        """dx (None unless `need_dx`); dw = dy^T x and db = column sums go to the accumulators."""
        ...

    # -- pointwise ------------------------------------------------------------------------------------------------

    def activate(self, kind: Activation, x: Array) -> Array:
        """Element-wise, except swiglu, which halves the last axis."""
        ...

    def activate_backward(self, kind: Activation, dy: Array, x: Array) -> Array:
        """dx, shaped as x."""
        ...

    def add(self, terms: Sequence[Array]) -> Array:
        """((t0 + t1) + t2) + …, in float32, rounded once."""
        ...

    def dropout(self, x: Array, rate: float, rng: Philox, residual: Array | None = None) -> Array:
        """keep(e) * x * dropout_scale(rate) (+ residual). Its own backward: dx = dropout(dy, rate, rng)."""
        ...

    def random_mask(self, x: Array, rate: float, rng: Philox) -> Array:
        """keep(e) * x, without rescaling. Its own backward."""
        ...

    def rotate(self, x_BTD: Array, rope: Rope, backward: bool = False) -> Array:
        """Turn pair (2i, 2i+1) of row t by (first + t) * theta**(-2i/D) (by the negative angle: the backward)."""
        ...

    def causal_mask(self, x: Array, fill: float) -> Array:
        """x[..., i, j] where j <= i, else `fill`. Backward: causal_mask(dy, 0.0)."""
        ...

    # -- layers ---------------------------------------------------------------------------------------------------

    def layernorm(self, x_RD: Array, g_D: Array, b_D: Array | None, eps: float) -> tuple[Array, Array, Array]:
        """(y, mean_R, rstd_R), the last two float32. Biased variance."""
        ...

    def layernorm_backward(
        self,
        dy_RD: Array,
        x_RD: Array,
        g_D: Array,
        mean_R: Array,
        rstd_R: Array,
        into_g: Array,
        into_b: Array | None,
        accumulate: bool,
    ) -> Array:
        """dx; dg and db go to the accumulators."""
        ...

    def residual_norm(
        self,
        x_RD: Array,
        bias_D: Array | None,
        residual_RD: Array,
        rate: float,
        rng: Philox | None,
        g_D: Array,
        b_D: Array | None,
        eps: float,
    ) -> tuple[Array, Array, Array, Array]:
        """(sum, y, mean_R, rstd_R) of sum = residual + dropout(x + bias), y = layernorm(sum). `rng` None: no dropout."""
        ...

    def residual_norm_backward(
        self,
        dy_RD: Array,
        dsum_RD: Array | None,
        sum_RD: Array,
        rate: float,
        rng: Philox | None,
        g_D: Array,
        mean_R: Array,
        rstd_R: Array,
        into_bias: Array | None,
        into_g: Array,
        into_b: Array | None,
        accumulate: bool,
    ) -> tuple[Array, Array]:
        """(dx, dresidual): dresidual = dsum + layernorm'(dy), dx = dropout'(dresidual); bias gets the column sums of dx."""
        ...

    def embedding(self, ids_BT: Array, w_VD: Array, positions_TD: Array | None, precision: Precision) -> Array:
        """w[ids] (+ positions[:T]) as [B, T, D] in `precision`."""
        ...

    def embedding_backward(self, dy_BTD: Array, ids_BT: Array, into_w: Array, into_positions: Array | None, accumulate: bool) -> None:
        """Sums per id and per position, in the order of rows."""
        ...

    def attention(
        self, qkv_BTF: Array, bias_F: Array | None, heads: int, causal: bool, rope: Rope | None
    ) -> tuple[Array, tuple[Array, ...]]:
        """Softmax attention, scale 1/sqrt(head_dim), of qkv + bias. F = 3 * heads * head_dim columns: all of q (head after head), k, v.

        `qkv` is given away: it may be overwritten. Returns (o [B, T, heads * head_dim], what the backward needs).
        """
        ...

    def attention_cached(self, qkv_BTF: Array, bias_F: Array | None, heads: int, rope: Rope | None, into_BSE: Array, first: int) -> Array:
        """Causal attention of positions `first`, `first` + 1, … over themselves and those before them, whose keys and values are kept.

        `into` has S >= first + T rows of E = 2 * heads * head_dim columns: all of k with its bias and turned, all of v with its bias.
        Rows before `first` are read, those of the new positions written, later ones left alone. `rope.first` counts for nothing here.
        `qkv` is given away. Returns o [B, T, heads * head_dim].
        """
        ...

    def attention_backward(
        self,
        do_BTD: Array,
        o_BTD: Array,
        bias_F: Array | None,
        saved: tuple[Array, ...],
        heads: int,
        causal: bool,
        rope: Rope | None,
        into_bias: Array | None,
        accumulate: bool,
    ) -> Array:
        """dqkv [B, T, F]; its column sums go to `into_bias`."""
        ...

    # -- costs ----------------------------------------------------------------------------------------------------

    def cross_entropy(self, logits_RV: Array, targets_R: Array, weight: Scalar, grad_scale: Scalar) -> tuple[Scalar, Array]:
        """(weight * sum over rows of -log softmax(logits)[target], grad_scale * weight * dlogits).

        Rows whose target is negative count nothing. The sum is float64 over float32 rows, in order.
        """
        ...

    def cross_entropy_of_probabilities(self, p_RV: Array, targets_R: Array, weight: Scalar, grad_scale: Scalar) -> tuple[Scalar, Array]:
        """The same of probabilities: -log max(p, 1e-12)."""
        ...

    def mean_squared_error(self, x: Array, target: Array, weight: Scalar, grad_scale: Scalar) -> tuple[Scalar, Array]:
        """(weight * sum over rows of mean over features of (x - target)^2, grad_scale * its gradient).

        `target` has the shape of x, or is int ids of shape x.shape[:-1], which stand for one-hot rows; negative ids count nothing.
        """
        ...

    def lm_head_cross_entropy(
        self,
        x_RD: Array,
        w_VD: Array,
        b_V: Array | None,
        targets_R: Array,
        weight: Scalar,
        grad_scale: Scalar,
        into_w: Array | None,
        into_b: Array | None,
        accumulate: bool,
    ) -> tuple[Scalar, Array | None]:
        """`linear` + `cross_entropy`, forward and backward in one pass over tiles of tokens: (loss, dx).

        Without accumulators (`into_w` None: validation) only the loss; dx is then None.
        """
        ...

    # -- optimizer ------------------------------------------------------------------------------------------------

    def fold_shards(self, grads_SN: Array) -> tuple[float, bool]:
        """grads[0] += grads[1] += … in order. Returns (sum of squares of the result in float64, all finite)."""
        ...

    def step_end(self, trained: Sequence[Trained], groups: Sequence[int], loss_scale: Scalar) -> StepEnd | None:
        """All parameters of a session as one; None where they are better updated one by one (CPU).

        `groups` says how many consecutive parameters each node has: squares are summed per node first, then over nodes.
        `loss_scale` is the scalar that costs multiply by; the decision of a step moves it.
        """
        ...

    def ipc(self) -> Any | None:
        """What lets processes of this host hand tensors from device to device (`bus.lanes.base.DevicePort`); None without a device."""
        ...

    def recording(self, beside: Recording | None = None) -> Recording | None:
        """For work that repeats with arrays of the same shapes; None where there is nothing to gain (CPU).

        It has memory of its own, or shares that of `beside`: then they must always run in the order in which they first ran, and what one
        gave must be used up before an earlier one runs again.
        """
        ...

    def add_into(self, into: Array, x: Array) -> None:
        """into += x (a tied gradient joins its owner's)."""
        ...

    def adam(self, step: AdamStep, w: Array, g: Array, m: Array, v: Array, low: Array | None) -> None:
        """Updates fp32 w, m, v in place, and writes the rounded copy `low` where there is one."""
        ...

    def sgd(self, step: SgdStep, w: Array, g: Array, m: Array | None, low: Array | None) -> None:
        """Updates fp32 w (and momentum m) in place, and writes `low`."""
        ...


def dropout_threshold(rate: float) -> int:
    """What the 16 bits of a kept element at least are."""
    return int(rate * 2**16)


def dropout_scale(rate: float) -> float:
    """What kept elements are multiplied by: 1 / the share that is kept, so that the expectation is exact."""
    return 1.0 / (1.0 - dropout_threshold(rate) / 2**16)


def width(precision: Precision) -> int:
    """Bytes per element."""
    return {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}[precision]


def is_integer(x: HostArray) -> bool:
    """Whether an array holds ids rather than numbers."""
    return bool(np.issubdtype(x.dtype, np.integer))
