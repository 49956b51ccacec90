"""The trainer: feeds micro-batches, counts losses and reports, decides steps. One per deployment of a session.

Rule 1: a micro-batch is in flight from its feeding to its last `Loss` (or the end of its step); at most `window` are.
Rule 2: nothing of step n + 1 + AHEAD is fed before step n is decided; nothing beyond `limit` is fed at all.
Rule 3: sums run in a fixed order: losses over micro-batches and then over costs in node order, squared norms in node order.
Rule 4: a PNode that repeats the report of a decided step gets the decision again.
Rule 5: a PNode that holds the whole network decides by the same function; then only its `StepDone` is awaited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from dcnr.bus import subjects
from dcnr.bus.messages import Decision, Loss, StepDone, StepMetrics, StepReport
from dcnr.ids import NodeId, PNodeId
from dcnr.optim.decide import MIN_LOSS_SCALE, ScalerState, decide, in_order
from dcnr.optim.hyper import Hyper
from dcnr.orchestrator.commands import Command, Measured, Publish, ReadBatch, SendHop
from dcnr.orchestrator.feed import Address, Batch, Feeds, batch_of, micro_hops

AHEAD = 1
"""Steps fed beyond the one being decided."""
AHEAD_ALONE = 2
"""The same where the PNode decides: three steps are in flight."""
HOPELESS_STEPS = 20
"""Skipped steps in a row, with no smaller loss scale to try, after which training is given up."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What stays the same for a whole deployment. `order` and `costs` in node order; `window` in micro-batches."""

    address: Address
    feeds: Feeds
    order: tuple[NodeId, ...]
    costs: tuple[NodeId, ...]
    hyper: Hyper
    dataset: str
    seed: int
    steps: int
    batch: int
    micro_batches: int
    window: int
    decides: bool

    @property
    def hosts(self) -> tuple[PNodeId, ...]:
        """The PNodes that take part, by name."""
        return tuple(sorted(set(self.address.homes.values())))

    @property
    def ahead(self) -> int:
        """Steps fed beyond the one being decided."""
        return AHEAD_ALONE if self.decides else AHEAD


@dataclass(slots=True)
class Step:
    """What is known of a step under way."""

    fed: int = 0
    in_flight: set[int] = field(default_factory=set)
    losses: dict[tuple[NodeId, int], float] = field(default_factory=dict)
    reports: dict[PNodeId, StepReport] = field(default_factory=dict)


class Trainer:
    """Steps `done + 1` to `limit` of one deployment."""

    def __init__(self, plan: Plan, done: int, scaler: ScalerState, now: float) -> None:
        self.plan = plan
        self.done = done
        self.scaler = scaler
        self.limit = plan.steps
        self.loss: float | None = None
        self.skipped_in_a_row = 0
        self._steps: dict[int, Step] = {}
        self._batches: dict[int, Batch] = {}
        self._asked = done
        self._decision: Decision | None = None
        self._completed_at = now

    @property
    def idle(self) -> bool:
        """Everything that may be fed has been decided."""
        return self.done >= self.limit

    @property
    def hopeless(self) -> str | None:
        """Why going on makes no sense, if it makes none."""
        if self.skipped_in_a_row < HOPELESS_STEPS:
            return None
        return (
            f"the gradients of {self.skipped_in_a_row} steps in a row, up to step {self.done}, were not finite"
            f" at loss scale {self.scaler.loss_scale:g}; try a smaller lr, or clip_norm"
        )

    def begin(self, now: float) -> None:
        """Steps are timed from here."""
        self._completed_at = now

    def stop(self) -> None:
        """Feed no step that has not begun; the ones in flight are finished."""
        begun = [number for number, step in self._steps.items() if step.fed]
        self.limit = min(self.limit, max(begun, default=self.done))

    def pump(self) -> list[Command]:
        """Ask for batches and feed micro-batches, as far as the rules allow."""
        last = min(self.limit, self.done + 1 + self.plan.ahead)
        wanted = range(self._asked + 1, min(self.limit, last + 1) + 1)
        self._asked += len(wanted)
        commands: list[Command] = [self._read(number) for number in wanted]
        for number in range(self.done + 1, last + 1):
            step = self._steps.setdefault(number, Step())
            while step.fed < self.plan.micro_batches and number in self._batches and self._room():
                commands += self._feed(number, step)
            if step.fed < self.plan.micro_batches:
                break
        return commands

    def batch_read(self, number: int, tokens_BS: np.ndarray) -> list[Command]:
        """The ids of a step are here."""
        if number <= self.done:
            return []
        self._batches[number] = batch_of(tokens_BS)
        return self.pump()

    def lost(self, loss: Loss) -> list[Command]:
        """A micro-batch reached a cost."""
        step = self._steps.get(loss.step)
        if step is None or loss.cost not in self.plan.costs:
            return []
        step.losses[loss.cost, loss.micro] = loss.loss
        if all((cost, loss.micro) in step.losses for cost in self.plan.costs):
            step.in_flight.discard(loss.micro)
        return self.pump()

    def reported(self, report: StepReport, now: float) -> list[Command]:
        """A PNode has done its part of a step."""
        if self._decision is not None and report.step == self._decision.step:
            return [self._broadcast(self._decision)]
        if report.step != self.done + 1 or report.pnode not in self.plan.hosts:
            return []
        step = self._steps.setdefault(report.step, Step())
        step.reports[report.pnode] = report
        if len(step.reports) < len(self.plan.hosts):
            return []
        return [*self._decide(step, now), *self.pump()]

    def decided(self, done: StepDone, now: float) -> list[Command]:
        """The PNode that holds the whole network finished a step."""
        if not self.plan.decides or done.step <= self.done:
            return []
        return [*self._finish(done, scaler_of(done.state), now), *self.pump()]

    def _read(self, number: int) -> ReadBatch:
        plan = self.plan
        return ReadBatch(plan.address.session, plan.address.epoch, plan.dataset, plan.seed, number, plan.batch, plan.feeds.seq_len)

    def _room(self) -> bool:
        return self.plan.decides or sum(len(step.in_flight) for step in self._steps.values()) < self.plan.window

    def _feed(self, number: int, step: Step) -> list[Command]:
        at = (step.fed, self.plan.micro_batches)
        step.in_flight.add(step.fed)
        step.fed += 1
        hops = micro_hops(self._batches[number], self.plan.feeds, self.plan.address, number, at)
        return [SendHop(to, hop, payload) for to, hop, payload in hops]

    def _decide(self, step: Step, now: float) -> list[Command]:
        for report in step.reports.values():
            step.losses.update({(cost, micro): loss for cost, micro, loss in report.losses})
        norms = {node: value for report in step.reports.values() for node, value in report.squared_norms.items()}
        finite = all(report.finite for report in step.reports.values())
        number = self.done + 1
        verdict = decide(
            self.plan.hyper, self.plan.steps, number, self.scaler, [norms[node] for node in self.plan.order if node in norms], finite
        )
        at = self.plan.address
        self._decision = Decision(
            at.session, at.epoch, number, verdict.skip, verdict.state.updates, verdict.lr, verdict.lr_factor, verdict.grad_factor,
            verdict.state.loss_scale,
        )  # fmt: skip
        done = StepDone(
            at.sender, at.session, at.epoch, number, step_loss(step.losses, self.plan.costs), verdict.grad_norm, verdict.skip,
            verdict.lr, self.scaler.loss_scale, {},
        )  # fmt: skip
        return [self._broadcast(self._decision), *self._finish(done, verdict.state, now)]

    def _finish(self, done: StepDone, after: ScalerState, now: float) -> list[Command]:
        seconds = max(1e-6, now - self._completed_at) / (done.step - self.done)
        tokens = self.plan.batch * self.plan.feeds.seq_len
        metrics = StepMetrics(
            done.session, done.step, done.loss, done.lr, done.grad_norm, done.loss_scale, done.skipped, tokens / seconds, seconds * 1000
        )
        for number in range(self.done + 1, done.step + 1):
            self._steps.pop(number, None)
            self._batches.pop(number, None)
        stuck = done.skipped and (not after.dynamic or after.loss_scale <= MIN_LOSS_SCALE)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if stuck else 0
        self.done, self.scaler, self.loss, self._completed_at = done.step, after, done.loss, now
        return [Measured(metrics)]

    def _broadcast(self, decision: Decision) -> Publish:
        return Publish(subjects.step(self.plan.address.network), decision)


def step_loss(losses: Mapping[tuple[NodeId, int], float], costs: Sequence[NodeId]) -> float:
    """The loss of a step: per cost the sum over its micro-batches in order, and those summed in the order of `costs`."""
    return in_order(in_order(losses[key] for key in sorted(losses) if key[0] == cost) for cost in costs)


def scaler_of(fields: Mapping[str, int | float]) -> ScalerState:
    """The state whose fields travelled."""
    return ScalerState(int(fields["updates"]), float(fields["loss_scale"]), int(fields["good_steps"]), bool(fields["dynamic"]))


def scaler_fields(scaler: ScalerState) -> dict[str, int | float]:
    """The state as it travels."""
    return asdict(scaler)
