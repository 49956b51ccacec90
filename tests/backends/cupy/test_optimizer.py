"""The end of a step: measured, decided and updated on the device, to the bits of the NumPy backend and of `optim.decide`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

from dcnr.backends.base import AdamStep, HostArray, ScalerNumbers, SgdStep, Trained
from dcnr.backends.cupy import optimizer
from dcnr.backends.cupy.array import DeviceArray, Dtype
from dcnr.backends.load import load_backend
from dcnr.errors import InvariantError
from dcnr.optim.decide import MAX_LOSS_SCALE, MIN_LOSS_SCALE, ScalerState, decide
from dcnr.optim.hyper import Hyper
from tests.backends.cupy.emulator.device import EmulatedDevice, get, put

NUMPY = load_backend("numpy")
FLOAT32, FLOAT16, BFLOAT16 = (np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
ADAM = AdamStep(1e-3, 0.9, 0.999, 1e-8, 0.1, 1 - 0.9**3, 1 - 0.999**3, 0.37)
SGD = SgdStep(0.1, 0.9, 0.05, 0.37)
SIZES = (1, 7, 33, 127, 0, 4096, 4100, 9000)
CONSTANT = SgdStep(1.0, 0.0, 0.0, 0.0)

Step = AdamStep | SgdStep


def draw(*shape: int, dtype: Dtype = FLOAT32, seed: int = 0) -> HostArray:
    """Normal numbers that depend on the shape and the seed alone."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


class Host(NamedTuple):
    """One parameter and all that trains it."""

    master: HostArray
    low: HostArray | None
    gradients: HostArray
    m: HostArray
    v: HostArray


class Model:
    """Parameters on the host and on a device."""

    def __init__(
        self, device: EmulatedDevice, sizes: Sequence[int], low: Dtype | None = FLOAT16, groups: Sequence[int] = (), start: int = 0
    ) -> None:
        """Arrays begin `start` elements behind an aligned address."""
        self.device = device
        self.host = [self._drawn(size, low) for size in sizes]
        self.trained = [
            Trained(
                self._put(one.master, start), None if one.low is None else self._put(one.low, start), self._put(one.gradients, start), (),
                self._put(one.m, start), self._put(one.v, start),
            )
            for one in self.host
        ]  # fmt: skip
        self.loss_scale = device.empty((), FLOAT32)
        self.end = optimizer.StepEnd(device, self.trained, groups or [len(sizes)], self.loss_scale)

    def _drawn(self, size: int, low: Dtype | None) -> Host:
        copy = None if low is None else np.zeros(size, low)
        return Host(draw(size, seed=1), copy, draw(1, size, seed=2), draw(size, seed=3), draw(size, seed=4) ** 2)

    def _put(self, host: HostArray, start: int) -> DeviceArray:
        raw = put(self.device, np.concatenate([np.zeros(start, host.dtype), host.reshape(-1)]))
        return raw[start:].reshape(*host.shape)

    def set_gradient(self, parameter: int, value: HostArray) -> None:
        """On both sides."""
        self.host[parameter].gradients[...] = value
        self.device.upload(self.trained[parameter].gradients, value.reshape(1, -1))

    def update(self, steps: Sequence[Step]) -> None:
        """On the host."""
        for step, (master, low, gradients, m, v) in zip(steps, self.host, strict=True):
            if isinstance(step, AdamStep):
                NUMPY.adam(step, master, gradients[0], m, v, low)
            else:
                NUMPY.sgd(step, master, gradients[0], m if step.momentum else None, low)

    def bits(self) -> list[bytes]:
        """All that an update may change, on the device."""
        return [get(array).tobytes() for one in self.trained for array in (one.master, one.m, one.v, one.low) if array is not None]

    def wanted(self) -> list[bytes]:
        """The same on the host."""
        return [array.tobytes() for master, low, _, m, v in self.host for array in (master, m, v, low) if array is not None]


# -- measure --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1])
def test_gradients_are_measured(start: int) -> None:
    """Sums of squares of every parameter, in float64, wherever arrays begin; the same bits in either order of threads."""
    found = [get(Model(EmulatedDevice(reverse=reverse), SIZES, start=start).end.measure()) for reverse in (False, True)]
    assert found[0].tobytes() == found[1].tobytes()
    wanted = [float((draw(1, size, seed=2).astype(np.float64) ** 2).sum()) for size in SIZES]
    np.testing.assert_allclose(found[0], [*wanted, 1], rtol=1e-14)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("size", [1, 33, 4100])
def test_shards_and_tied_gradients_join_in_order(size: int, start: int) -> None:
    """The first shard holds ((s0 + s1) + t0) + t1, to the bit, and that is what is measured."""
    device = EmulatedDevice()
    shards, tied, other = draw(2, size, seed=5), [draw(size, seed=seed) for seed in (6, 7)], draw(1, 9)
    gradients = put(device, np.concatenate([np.zeros(start, np.float32), shards.reshape(-1)]))[start:].reshape(2, size)
    trained = [
        Trained(put(device, draw(9)), None, put(device, other), (), None, None),
        Trained(put(device, draw(size)), None, gradients, tuple(put(device, one) for one in tied), None, None),
    ]
    squares = get(optimizer.StepEnd(device, trained, [1, 1], device.empty((), FLOAT32)).measure())
    wanted = ((shards[0] + shards[1]) + tied[0]) + tied[1]
    assert get(gradients)[0].tobytes() == wanted.tobytes()
    assert get(gradients)[1].tobytes() == shards[1].tobytes()
    np.testing.assert_allclose(squares, [(other.astype(np.float64) ** 2).sum(), (wanted.astype(np.float64) ** 2).sum(), 1], rtol=1e-14)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 4095, 4096, 8999])
def test_infinity_and_nan_are_found(at: int, bad: float) -> None:
    """Anywhere; a large number is neither."""
    model = Model(EmulatedDevice(), SIZES)
    model.set_gradient(7, np.full(9000, 3e38, np.float32))
    assert get(model.end.measure())[-1] == 1
    gradient = np.zeros(9000, np.float32)
    gradient[at] = bad
    model.set_gradient(7, gradient)
    assert get(model.end.measure())[-1] == 0


# -- update ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("low", [None, FLOAT16, BFLOAT16, FLOAT32])
def test_updates_have_the_bits_of_numpy(low: Dtype | None, start: int) -> None:
    """Adam with and without decay, SGD with and without momentum, side by side, three times."""
    model = Model(EmulatedDevice(), SIZES, low, start=start)
    kinds: list[Step] = [ADAM, ADAM._replace(weight_decay=0.0), SGD, ADAM]
    steps = [kinds[number % 4] for number in range(len(SIZES))]
    for _ in range(3):
        model.end.update(steps)
        model.update(steps)
    assert model.bits() == model.wanted()


def test_sgd_without_momentum_needs_no_moments() -> None:
    """And Adam does."""
    device = EmulatedDevice()
    w, g = draw(33), draw(1, 33, seed=2)
    end = optimizer.StepEnd(device, [Trained(put(device, w), None, put(device, g), (), None, None)], [1], device.empty((), FLOAT32))
    end.update([SGD._replace(momentum=0.0)])
    with pytest.raises(InvariantError, match="no moments"):
        end.update([ADAM])


def test_many_parameters() -> None:
    """More than blocks of the decision and of nodes have threads, each with numbers of its own."""
    sizes = [1 + number % 5 for number in range(700)]
    model = Model(EmulatedDevice(), sizes, None, groups=[2] * 350)
    steps = [ADAM._replace(lr=1e-3 * (1 + number % 9), grad_factor=1.0) for number in range(700)]
    model.end.start(ScalerNumbers(2, 1.0, 0, False, 2000, MIN_LOSS_SCALE, MAX_LOSS_SCALE))
    report = get(model.end.settle(3, [steps], 0.0))
    model.update(steps)
    assert model.bits() == model.wanted()
    np.testing.assert_allclose(report[4], math.sqrt(sum(float((one.gradients.astype(np.float64) ** 2).sum()) for one in model.host)))


# -- decide ---------------------------------------------------------------------------------------------------------------


def state_of(report: HostArray, dynamic: bool) -> ScalerState:
    """What a report says about the state after the step."""
    return ScalerState(int(report[0]), float(report[1]), int(report[2]), dynamic)


@pytest.mark.parametrize("clip_norm", [0.0, 1.0, 1e9])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("loss_scale", [1024.0, 3.7, MAX_LOSS_SCALE, MIN_LOSS_SCALE])
def test_decisions_are_those_of_the_trainer(loss_scale: float, dynamic: bool, clip_norm: float) -> None:
    """Over steps of which some overflow: scale, counters, norm and gradient factor are equal to the bit."""
    hyper = Hyper(loss_scale_window=3, clip_norm=clip_norm)
    device = EmulatedDevice()
    groups = [2, 1, 3, 2]
    model = Model(device, SIZES, groups=groups)
    state = ScalerState(loss_scale=loss_scale, dynamic=dynamic)
    model.end.start(ScalerNumbers(0, loss_scale, 0, dynamic, 3, MIN_LOSS_SCALE, MAX_LOSS_SCALE))
    assert get(model.loss_scale) == np.float32(loss_scale)
    rng = np.random.default_rng(1)
    for step, overflows in enumerate((0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0), 1):
        for number, size in enumerate(SIZES):
            model.set_gradient(number, (rng.standard_normal(size) * 10.0 ** rng.integers(-3, 4)).astype(np.float32))
        model.set_gradient(0, np.array([np.inf if overflows else 1], np.float32))
        model.device.upload(model.trained[0].master, np.zeros(1, np.float32))
        squares = iter(get(model.end.measure())[:-1].tolist())
        norms = []
        for size in groups:
            norms.append(0.0)
            for _ in range(size):
                norms[-1] += next(squares)
        verdict = decide(hyper, 100, step, state, norms, not overflows)
        report = get(model.end.settle(state.updates + 1, [[CONSTANT] * len(SIZES)], clip_norm))
        assert state_of(report, dynamic) == verdict.state
        assert report[3:].tolist() == [verdict.skip, verdict.grad_norm, state.loss_scale]
        assert get(model.loss_scale) == np.float32(verdict.state.loss_scale)
        assert get(model.trained[0].master)[0] == np.float32(-verdict.grad_factor)
        state = verdict.state


def test_a_skipped_step_changes_nothing() -> None:
    """No parameter, moment or copy; the next one finds its numbers among the candidates, whatever was skipped."""
    model = Model(EmulatedDevice(), SIZES)
    model.end.start(ScalerNumbers(4, 8.0, 1, True, 2000, MIN_LOSS_SCALE, MAX_LOSS_SCALE))
    candidates = [[ADAM._replace(lr=lr, grad_factor=0.0)] * len(SIZES) for lr in (1e-3, 2e-3, 3e-3)]
    before, gradient = model.bits(), model.host[6].gradients.copy()
    model.set_gradient(6, np.full(4100, np.nan, np.float32))
    skipped = get(model.end.settle(5, candidates[:1], 1.0))
    assert skipped.tolist() == [4, 4, 0, 1, math.inf, 8]
    assert model.bits() == before
    model.set_gradient(6, gradient)
    assert get(model.end.settle(5, candidates[:2], 0.0))[:4].tolist() == [5, 4, 1, 0]
    model.update([ADAM._replace(lr=1e-3, grad_factor=0.25)] * len(SIZES))
    assert model.bits() == model.wanted()
    assert get(model.end.settle(5, candidates, 0.0))[:4].tolist() == [6, 4, 2, 0]
    model.update([ADAM._replace(lr=2e-3, grad_factor=0.25)] * len(SIZES))
    assert model.bits() == model.wanted()


@pytest.mark.parametrize("first", [1, 4])
def test_an_update_that_is_no_candidate_shows(first: int) -> None:
    """The report says NaN updates, and nothing changes."""
    model = Model(EmulatedDevice(), SIZES)
    state = ScalerNumbers(2, 8.0, 1, True, 2000, MIN_LOSS_SCALE, MAX_LOSS_SCALE)
    model.end.start(state)
    before = model.bits()
    assert np.isnan(get(model.end.settle(first, [[ADAM] * len(SIZES)] * 2, 1.0))[0])
    assert model.bits() == before
    assert get(model.end.settle(3, [[ADAM] * len(SIZES)], 0.0))[:4].tolist() == [3, 8, 2, 0]


def test_a_step_is_settled_without_the_host() -> None:
    """One upload, no wait, and the same bits in either order of threads."""
    results = []
    for reverse in (False, True):
        device = EmulatedDevice(reverse=reverse)
        model = Model(device, SIZES)
        model.end.start(ScalerNumbers(0, 8.0, 1, True, 2000, MIN_LOSS_SCALE, MAX_LOSS_SCALE))
        uploads = device.uploads
        report = model.end.settle(1, [[ADAM] * len(SIZES)], 1.0)
        assert device.uploads == uploads + 1
        assert device.waits == 0
        results.append((get(report).tobytes(), model.bits()))
    assert results[0] == results[1]


def test_nothing_to_train() -> None:
    """No parameters: finite, norm zero, and updates are counted."""
    device = EmulatedDevice()
    end = optimizer.StepEnd(device, [], [], device.empty((), FLOAT32))
    assert get(end.measure()).tolist() == [1]
    end.start(ScalerNumbers(0, 1.0, 0, False, 2000, MIN_LOSS_SCALE, MAX_LOSS_SCALE))
    end.update([])
    assert get(end.settle(1, [[]], 1.0)).tolist() == [1, 1, 1, 0, 0, 1]


def test_mistakes_are_refused() -> None:
    """Groups that are not those of the parameters, and a step before the scaler is known."""
    device = EmulatedDevice()
    with pytest.raises(InvariantError, match="2 parameters, but 0"):
        optimizer.StepEnd(device, [], [2], device.empty((), FLOAT32))
    with pytest.raises(InvariantError, match="before its loss scaler"):
        optimizer.StepEnd(device, [], [], device.empty((), FLOAT32)).settle(1, [[]], 1.0)


# -- one parameter ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 33, 5000])
def test_single_parameters(size: int) -> None:
    """Folding and updates one by one equal NumPy's."""
    device = EmulatedDevice()
    grads = draw(3, size, seed=5)
    folded = put(device, grads)
    squares, finite = optimizer.fold_shards(device, folded)
    wanted, _ = NUMPY.fold_shards(grads)
    assert get(folded)[0].tobytes() == grads[0].tobytes()
    assert squares == pytest.approx(wanted, rel=1e-14)
    assert finite
    w, m, v, low = draw(size), draw(size, seed=3), draw(size, seed=4) ** 2, np.zeros(size, BFLOAT16)
    g = grads[0]
    w_, g_, m_, v_, low_ = (put(device, one) for one in (w, g, m, v, low))
    optimizer.adam(device, ADAM, w_, g_, m_, v_, low_)
    NUMPY.adam(ADAM, w, g, m, v, low)
    optimizer.sgd(device, SGD, w_, g_, m_, low_)
    NUMPY.sgd(SGD, w, g, m, low)
    optimizer.sgd(device, SGD, w_, g_, None, None)
    NUMPY.sgd(SGD, w, g, None, None)
    for actual, right in ((w_, w), (m_, m), (v_, v), (low_, low)):
        assert get(actual).tobytes() == right.tobytes()


def test_a_shard_that_is_not_finite_shows() -> None:
    """Also where two infinities cancel."""
    device = EmulatedDevice()
    assert not optimizer.fold_shards(device, put(device, np.array([[np.inf], [-np.inf]], np.float32)))[1]
