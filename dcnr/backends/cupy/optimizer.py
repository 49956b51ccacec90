"""The end of a step for all parameters at once: measure, decide, update, each one launch over pieces of all parameters.

Rule 1: addresses and sizes are uploaded once; a step uploads one small table: the numbers of its updates.
Rule 2: nothing waits for the host. What the host learns it reads from the report, whenever that arrives.
Rule 3: updates give the bits of the NumPy backend.

P parameters, K candidates, G groups of parameters whose numbers are equal in every candidate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from dcnr.backends.base import AdamStep, HostArray, ScalerNumbers, SgdStep, Trained
from dcnr.backends.cupy.array import FLOAT64, INT32, UINT8, UINT32, DeviceArray
from dcnr.backends.cupy.arrays import uploaded
from dcnr.backends.cupy.device import Device, Kernel
from dcnr.errors import InvariantError

PIECE = 4096
"""Elements of a piece, as in `optimizer.cu`."""
PIECES = np.dtype(
    [
        ("master", "u8"), ("gradient", "u8"), ("low", "u8"), ("m", "u8"), ("v", "u8"), ("start", "u8"),
        ("size", "u4"), ("parameter", "u4"), ("addend", "u4"), ("addends", "u2"), ("low_kind", "u1"), ("aligned", "u1"),
    ]
)  # fmt: skip
"""`struct Piece`."""
STEP_WORDS = 12
"""`struct Step`."""
LOW_KINDS: Mapping[str, int] = MappingProxyType({"float16": 1, "bfloat16": 2, "float32": 3})

Step = AdamStep | SgdStep


class Pieces:
    """Parameters cut into pieces that a block does at a time, described in device memory."""

    def __init__(self, device: Device, trained: Sequence[Trained]) -> None:
        self._device = device
        self._trained = tuple(trained)
        """Keeps alive what the table points to."""
        addends, begins = _addends(self._trained)
        cut = [_cut(number, one, begins[number : number + 2]) for number, one in enumerate(self._trained)]
        counts = np.cumsum([0, *(len(part) for part in cut)], dtype=INT32)
        self._count = int(counts[-1])
        self._pieces = uploaded(device, np.concatenate([*cut, np.empty(0, PIECES)]).view(UINT8))
        self._addends = uploaded(device, np.array([*addends, 0], np.uint64).view(UINT8))
        self._first = uploaded(device, counts)
        self._squares = device.empty((max(1, self._count),), FLOAT64)
        self._without_moments = [number for number, one in enumerate(self._trained) if one.m is None or one.v is None]

    def kernel(self, name: str) -> Kernel:
        """Compiled with pack2 for bfloat16: which parameters are stored so is known at run time."""
        return self._device.kernel("optimizer", name, "STORAGE=2")

    def measure(self) -> DeviceArray:
        """Fold shards and tied gradients into the first shard, once a step. Float64 [P + 1]; the first P, sums of squares, are written."""
        squares = self._device.empty((len(self._trained) + 1,), FLOAT64)
        if self._count:
            self._device.launch(self.kernel("measure"), (self._count, 1), 256, (self._pieces, self._addends, self._squares))
        if self._trained:
            self._device.launch(self.kernel("fold"), (len(self._trained), 1), 256, (self._squares, self._first, squares))
        return squares

    def update(self, candidates: Sequence[Sequence[Step]], decision: DeviceArray | None) -> None:
        """Update with the candidate that was decided for, if any; without a decision with the first, and its own gradient factor."""
        if not self._count:
            return
        for number in self._without_moments:
            if any(isinstance(steps[number], AdamStep) for steps in candidates):
                raise InvariantError(f"Adam for parameter {number}, which has no moments")
        numbers, groups = _table(candidates)
        table = uploaded(self._device, numbers)
        steps = STEP_WORDS * groups * len(candidates)
        self._device.launch(self.kernel("update"), (self._count, 1), 256, (self._pieces, table, table[steps:], groups, decision))


class StepEnd:
    """See `backends.base.StepEnd`."""

    def __init__(self, device: Device, trained: Sequence[Trained], groups: Sequence[int], loss_scale: DeviceArray) -> None:
        if sum(groups) != len(trained):
            raise InvariantError(f"nodes with {sum(groups)} parameters, but {len(trained)} parameters")
        self._device = device
        self._parameters = Pieces(device, trained)
        self._count = len(trained)
        self._nodes = len(groups)
        self._first = uploaded(device, np.cumsum([0, *groups], dtype=INT32))
        self._loss_scale = loss_scale
        self._scaler: DeviceArray | None = None
        self._decision = device.empty((2,), UINT32)

    def measure(self) -> DeviceArray:
        """See `backends.base.StepEnd.measure`."""
        squares = self._parameters.measure()
        kernel = self._parameters.kernel("all_finite")
        self._device.launch(kernel, (1, 1), 256, (squares, squares[self._count :], self._count))
        return squares

    def update(self, steps: Sequence[Step]) -> None:
        """See `backends.base.StepEnd.update`."""
        self._parameters.update([steps], None)

    def start(self, state: ScalerNumbers) -> None:
        """See `backends.base.StepEnd.start`; costs multiply by the state's loss scale from now on."""
        self._scaler = uploaded(self._device, np.array(state, FLOAT64))
        self._device.upload(self._loss_scale, np.array(state.loss_scale, np.float32))

    def settle(self, first_update: int, candidates: Sequence[Sequence[Step]], clip_norm: float) -> DeviceArray:
        """See `backends.base.StepEnd.settle`. If this update is none of the candidates, nothing happens and the report says NaN updates."""
        if self._scaler is None:
            raise InvariantError("a step is settled on the device before its loss scaler is set")
        squares = self._parameters.measure()
        report = self._device.empty((6,), FLOAT64)
        self._device.launch(
            self._parameters.kernel("decide"), (1, 1), 256,
            (squares, self._first, self._nodes, self._scaler, np.float64(clip_norm), np.float64(first_update), len(candidates),
             self._decision, self._loss_scale, report),
        )  # fmt: skip
        self._parameters.update(candidates, self._decision)
        return report


def fold_shards(device: Device, grads_SN: DeviceArray) -> tuple[float, bool]:
    """See `Backend.fold_shards`. Waits for the device."""
    squares = Pieces(device, [Trained(grads_SN[0], None, grads_SN, (), None, None)]).measure()
    total = float(device.fetch([squares[:1]]).wait()[0][0])
    return total, math.isfinite(total)


def adam(device: Device, step: AdamStep, w: DeviceArray, g: DeviceArray, m: DeviceArray, v: DeviceArray, low: DeviceArray | None) -> None:
    """See `Backend.adam`."""
    Pieces(device, [Trained(w, low, g.reshape(1, *g.shape), (), m, v)]).update([[step]], None)


def sgd(device: Device, step: SgdStep, w: DeviceArray, g: DeviceArray, m: DeviceArray | None, low: DeviceArray | None) -> None:
    """See `Backend.sgd`."""
    Pieces(device, [Trained(w, low, g.reshape(1, *g.shape), (), m, None)]).update([[step]], None)


def _addresses(one: Trained) -> Iterator[int]:
    """Of what joins the first shard of its gradient: the other shards, then the tied accumulators."""
    for array in (one.gradients[1:], *one.tied):
        yield from range(array.ptr, array.ptr + array.nbytes, max(1, one.master.nbytes))


def _addends(trained: Sequence[Trained]) -> tuple[list[int], list[int]]:
    """(addresses of all parameters' addends, where those of each parameter begin, and the end)."""
    addends: list[int] = []
    begins = [0]
    for one in trained:
        addends += _addresses(one)
        begins.append(len(addends))
    return addends, begins


def _cut(number: int, one: Trained, addends: Sequence[int]) -> HostArray:
    """The pieces of parameter `number`, whose addends are numbered from addends[0] up to addends[1]."""
    starts = np.arange(0, one.master.size, PIECE, dtype=np.uint64)
    pieces = np.zeros(len(starts), PIECES)
    arrays = {"master": one.master, "gradient": one.gradients, "low": one.low, "m": one.m, "v": one.v}
    aligned = all(address % 16 == 0 for address in _addresses(one))
    for name, array in arrays.items():
        if array is not None:
            pieces[name] = array.ptr + starts * array.dtype.itemsize
            aligned = aligned and array.ptr % (4 * array.dtype.itemsize) == 0
    pieces["start"], pieces["size"] = starts, np.minimum(PIECE, one.master.size - starts)
    pieces["parameter"], pieces["aligned"] = number, aligned
    pieces["addend"], pieces["addends"] = addends[0], addends[1] - addends[0]
    pieces["low_kind"] = 0 if one.low is None else LOW_KINDS[one.low.dtype.name]
    return pieces


def _table(candidates: Sequence[Sequence[Step]]) -> tuple[HostArray, int]:
    """([K, G] steps and the group of each parameter, one after the other; G)."""
    groups: dict[tuple[Step, ...], int] = {}
    of_parameters = [groups.setdefault(column, len(groups)) for column in zip(*candidates, strict=True)]
    rows = [_numbers(column[k]) for k in range(len(candidates)) for column in groups]
    words = np.array(rows, np.float32).view(np.uint32)
    words[:, 0] = [isinstance(column[k], AdamStep) for k in range(len(candidates)) for column in groups]
    return np.concatenate([words.reshape(-1), np.array(of_parameters, UINT32)]), len(groups)


def _numbers(step: Step) -> tuple[float, ...]:
    """`struct Step`; its first word is no float."""
    if isinstance(step, SgdStep):
        return (0, step.grad_factor, step.lr, step.weight_decay, step.momentum, 0, 0, 0, 1, 1, 0, 1)
    return (
        0, step.grad_factor, step.lr, step.weight_decay, step.beta1, 1 - step.beta1, step.beta2, 1 - step.beta2,
        step.correction1, step.correction2, step.eps, 1 - step.lr * step.weight_decay,
    )  # fmt: skip
