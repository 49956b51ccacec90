"""The end of a step: fold the gradients, decide, apply.

On a host one parameter after the other, on several threads; on a device all at once, without waiting for what it finds.
Both decide by the same rules (`optim.decide`), in the same order of sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from dcnr.agents.crew import Crew
from dcnr.agents.weights import Owned, Weights, squared_norms
from dcnr.backends.base import AdamStep, Backend, Scalar, ScalerNumbers, SgdStep, StepEnd
from dcnr.bus.messages import Deploy
from dcnr.errors import InvariantError
from dcnr.ids import NodeId
from dcnr.optim.decide import MAX_LOSS_SCALE, MIN_LOSS_SCALE, ScalerState, Verdict, clip_factor, decide
from dcnr.optim.hyper import Hyper
from dcnr.optim.schedule import lr_factor
from dcnr.optim.update import StepNumbers, update_of

T = TypeVar("T")

Later = Callable[[], T]
"""What a piece of work gave, once it is there: waits for it. Asked once, in the order of the work, on any thread."""

Written = Mapping[NodeId, int]
"""By node: how many row shards have gradients."""


class Settlement(NamedTuple):
    """A step that was decided and applied here, and the loss scale it ran with."""

    verdict: Verdict
    loss_scale: float


class Ending(Protocol):
    """`loss_scale` is what costs multiply by."""

    loss_scale: Scalar

    @property
    def state(self) -> ScalerState:
        """After the last settlement that was asked for."""
        ...

    def fold(self, written: Written) -> Later[tuple[dict[NodeId, float], bool]]:
        """(sum of squares per node that owns parameters, all finite) of the step's gradients."""
        ...

    def apply(self, skip: bool, numbers: StepNumbers, next_loss_scale: float) -> None:
        """Update every parameter, or none."""
        ...

    def settle(self, step: int, written: Written) -> Later[Settlement]:
        """Fold, decide and apply, where the whole network is here."""
        ...


def make_ending(backend: Backend, crew: Crew, deploy: Deploy, hyper: Hyper, weights: Weights) -> Ending:
    """For the loaded `weights`."""
    fields = deploy.state
    state = ScalerState(int(fields["updates"]), float(fields["loss_scale"]), int(fields["good_steps"]), bool(fields["dynamic"]))
    loss_scale = backend.scalar(float(state.loss_scale))
    learning = [owned for owned in weights.owned if owned.gradients is not None]
    device = backend.step_end([owned.trained() for owned in learning], _groups(learning), loss_scale)
    if device is None:
        return HostEnding(backend, crew, deploy, hyper, weights, state)
    return DeviceEnding(backend, device, deploy, hyper, learning, state, loss_scale)


def _groups(owned: Sequence[Owned]) -> list[int]:
    """How many parameters each node has, which are neighbours."""
    counts: dict[NodeId, int] = {}
    for one in owned:
        counts[one.node.id] = counts.get(one.node.id, 0) + 1
    return list(counts.values())


class HostEnding:
    """One parameter after the other, the large ones first, on the crew's threads."""

    def __init__(self, backend: Backend, crew: Crew, deploy: Deploy, hyper: Hyper, weights: Weights, state: ScalerState) -> None:
        self._state = state
        self.loss_scale: Scalar = state.loss_scale
        self._backend = backend
        self._crew = crew
        self._total_steps = deploy.total_steps
        self._hyper = hyper
        self._owned = weights.owned
        sizes = weights.sizes
        self._order = sorted(range(len(sizes)), key=lambda at: -sizes[at])

    @property
    def state(self) -> ScalerState:
        return self._state

    def fold(self, written: Written) -> Later[tuple[dict[NodeId, float], bool]]:
        measured = self._spread([partial(one.fold, self._backend, written.get(one.node.id, 0)) for one in self._owned])
        norms = squared_norms(zip(self._owned, measured, strict=True))
        return lambda: norms

    def apply(self, skip: bool, numbers: StepNumbers, next_loss_scale: float) -> None:
        if not skip:
            self._spread([partial(one.update, self._backend, self._hyper, numbers) for one in self._owned])
        self.loss_scale = next_loss_scale

    def settle(self, step: int, written: Written) -> Later[Settlement]:
        norms, finite = self.fold(written)()
        before = self._state
        verdict = decide(self._hyper, self._total_steps, step, before, list(norms.values()), finite)
        numbers = StepNumbers(verdict.state.updates, verdict.lr, verdict.lr_factor, verdict.grad_factor)
        self.apply(verdict.skip, numbers, verdict.state.loss_scale)
        self._state = verdict.state
        return lambda: Settlement(verdict, before.loss_scale)

    def _spread(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Do one task per owned parameter, the largest first, so that no thread ends long after the others."""
        results = dict(zip(self._order, self._crew.run([tasks[at] for at in self._order]), strict=True))
        return [results[at] for at in range(len(tasks))]


class DeviceEnding:
    """All parameters at once. The host issues step after step; it learns later what was decided."""

    def __init__(
        self,
        backend: Backend,
        device: StepEnd,
        deploy: Deploy,
        hyper: Hyper,
        owned: Sequence[Owned],
        state: ScalerState,
        loss_scale: Scalar,
    ) -> None:
        self.loss_scale = loss_scale
        self._known = (deploy.step, state)
        """The last step whose end the host knows, and the state after it; one value, since another thread sets it."""
        self._backend = backend
        self._device = device
        self._total_steps = deploy.total_steps
        self._hyper = hyper
        self._owned = owned
        bounds = (hyper.loss_scale_window, MIN_LOSS_SCALE, MAX_LOSS_SCALE)
        device.start(ScalerNumbers(state.updates, state.loss_scale, state.good_steps, state.dynamic, *bounds))

    @property
    def state(self) -> ScalerState:
        return self._known[1]

    def fold(self, written: Written) -> Later[tuple[dict[NodeId, float], bool]]:
        fetched = self._backend.fetch([self._device.measure()])

        def later() -> tuple[dict[NodeId, float], bool]:
            (found,) = fetched.wait()
            *squares, finite = found.tolist()
            return squared_norms(zip(self._owned, ((one, bool(finite)) for one in squares), strict=True))

        return later

    def apply(self, skip: bool, numbers: StepNumbers, next_loss_scale: float) -> None:
        if not skip:
            self._device.update(self._steps(numbers))
        (self.loss_scale,) = self._backend.set_scalars([self.loss_scale], [next_loss_scale])

    def settle(self, step: int, written: Written) -> Later[Settlement]:
        factor = lr_factor(self._hyper, step, self._hyper.decay_steps or self._total_steps)
        lr = self._hyper.lr * factor
        known, state = self._known
        first = state.updates + 1
        candidates = [self._steps(StepNumbers(first + k, lr, factor, 0.0)) for k in range(step - known)]
        fetched = self._backend.fetch([self._device.settle(first, candidates, self._hyper.clip_norm)])

        def later() -> Settlement:
            (found,) = fetched.wait()
            updates, scale, good_steps, skipped, norm, used = found.tolist()
            if math.isnan(updates):
                raise InvariantError(f"step {step} is none of the {len(candidates)} updates that the device was offered, from {first} on")
            after = ScalerState(int(updates), scale, int(good_steps), state.dynamic)
            self._known = (step, after)
            grad_factor = 0.0 if skipped else clip_factor(self._hyper, norm) / used
            return Settlement(Verdict(bool(skipped), lr, factor, grad_factor, norm, after), used)

        return later

    def _steps(self, numbers: StepNumbers) -> list[AdamStep | SgdStep]:
        """Of every parameter; equal ones are one object, since most are."""
        made: dict[object, AdamStep | SgdStep] = {}
        steps = []
        for one in self._owned:
            config, decay = one.node.config, one.parameter.decay
            key = (config.optimizer, config.learning_rate, config.weight_decay, decay)
            if key not in made:
                made[key] = update_of(self._hyper, config, decay, numbers)
            steps.append(made[key])
        return steps
