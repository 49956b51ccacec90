"""The trainer: feeds micro-batches, counts losses and reports, decides steps. One per deployment of a session.

Rule 1: a micro-batch is in flight from its feeding to its last `Loss` (or the end of its step); at most `window` are.
Rule 2: nothing of step n + 1 + AHEAD is fed before step n is decided; nothing beyond `limit` is fed at all, and nothing beyond `hold`
before it is released.
Rule 3: sums run in a fixed order: losses over micro-batches and then over costs in node order, squared norms in node order.
Rule 4: a PNode that repeats the report of a decided step gets the decision again.
Rule 5: a PNode that holds the whole network decides by the same function; then only its `StepDone`s are awaited, and taken in order. To
hear one again that was lost, a micro-batch of its step is fed again.
Rule 6: a step that is fed again has the next attempt: what PNodes say of an older attempt counts for nothing. Steps after it keep their
attempt, and what is known of them.
Rule 7: a decision that an earlier trainer of this deployment took is taken over from a PNode that has it.
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
    """What stays the same for a whole deployment. `order` and `costs` in node order; `window` in micro-batches.

    `peak_share`: of what the devices can do at most, one token per second takes so much; None where that is not known.
    """

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
    peak_share: float | None = None

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
    """What is known of a step under way. `done` is the word of the PNode that decides alone."""

    attempt: int = 0
    fed: int = 0
    in_flight: set[int] = field(default_factory=set)
    losses: dict[tuple[NodeId, int], float] = field(default_factory=dict)
    reports: dict[PNodeId, StepReport] = field(default_factory=dict)
    done: StepDone | None = None


class Trainer:
    """Steps `done + 1` to `limit` of one deployment."""

    def __init__(self, plan: Plan, done: int, scaler: ScalerState, now: float) -> None:
        self.plan = plan
        self.hosts = plan.hosts
        self.done = done
        self.scaler = scaler
        self.limit = plan.steps
        self.hold = plan.steps
        self.loss: float | None = None
        self.skipped_in_a_row = 0
        self.news = 0
        """Grows with everything that is fed or heard for the first time."""
        self.decision: Decision | None = None
        """The last one that was taken here, or taken over."""
        self._steps: dict[int, Step] = {}
        self._batches: dict[int, Batch] = {}
        self._asked = done
        self._begun = done
        """The last step of which anything was fed."""
        self._completed_at = now
        self._saved_at = now

    @property
    def idle(self) -> bool:
        """Everything that may be fed has been decided."""
        return self.done >= self.limit

    @property
    def under_way(self) -> bool:
        """Whether PNodes have what they need to get on with the next step: otherwise their silence means nothing."""
        return self.done < min(self.limit, self.hold) and self.done + 1 in self._batches

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
        self._completed_at = self._saved_at = now

    def release(self, hold: int, now: float) -> list[Command]:
        """Go on, up to step `hold`. What was done meanwhile is no time of a step."""
        self.hold, self._completed_at = hold, now
        return self.pump()

    def renew(self, attempt: int) -> None:
        """Feed the next step with an attempt that PNodes have not heard of."""
        self._steps[self.done + 1] = Step(attempt=attempt)

    def take_over(self, last: Decision, attempt: int, now: float) -> list[Command]:
        """Go on after the last decision of an earlier trainer.

        A PNode that decides alone may have done steps that nobody took note of: they are fed again, so that it says their `StepDone`s
        again; and it may have been fed as many more.
        """
        self._steps[last.step + 1] = Step(attempt=attempt)
        self.scaler = scaler_of(last.state)
        if self.plan.decides:
            self.done = self._asked = max(self.done, last.step - 1 - AHEAD_ALONE)
            self._begun = min(self.hold, last.step + 1 + AHEAD_ALONE)
            return self.pump()
        self._begun = self._asked = last.step
        self.done = last.step - 1
        return self.take(last, now)

    def take(self, last: Decision, now: float) -> list[Command]:
        """The next decision was taken by an earlier trainer: so be it. How long that step took is not known."""
        if self.plan.decides or last.step != self.done + 1:
            return []
        self.decision = last
        row = StepMetrics(last.session, last.step, last.loss, last.lr, last.grad_norm, last.loss_scale, last.skip, 0.0, 0.0, last.epoch)
        self._finish(row, scaler_of(last.state), now)
        return [self._broadcast(last), Measured(row), *self.pump()]

    def stop(self) -> None:
        """Feed no step that has not begun; the ones in flight are finished."""
        self.limit = min(self.limit, max(self._begun, self.done))

    def pump(self) -> list[Command]:
        """Ask for batches and feed micro-batches, as far as the rules allow."""
        last = min(self.limit, self.hold, self.done + 1 + self.plan.ahead)
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

    def again(self) -> list[Command]:
        """A message was lost: feed what is under way once more, the step that is to be decided as a new attempt."""
        for step in self._steps.values():
            step.fed = 0
            step.in_flight.clear()
        number = self.done + 1
        self._steps[number] = Step(attempt=self._steps.pop(number, Step()).attempt + 1)
        return self.pump()

    def batch_read(self, number: int, tokens_BS: np.ndarray) -> list[Command]:
        """The ids of a step are here."""
        if number <= self.done:
            return []
        self._batches[number] = batch_of(tokens_BS)
        return self.pump()

    def lost(self, loss: Loss) -> list[Command]:
        """A micro-batch reached a cost."""
        step, key = self._steps.get(loss.step), (loss.cost, loss.micro)
        if step is None or loss.attempt != step.attempt or loss.cost not in self.plan.costs or key in step.losses:
            return []
        self.news += 1
        step.losses[key] = loss.loss
        if self._through(step, loss.micro):
            step.in_flight.discard(loss.micro)
        return self.pump()

    def reported(self, report: StepReport, now: float) -> list[Command]:
        """A PNode has done its part of a step."""
        if self.decision is not None and report.step == self.decision.step:
            return [self._broadcast(self.decision)]
        if report.step != self.done + 1 or report.pnode not in self.hosts:
            return []
        step = self._steps.setdefault(report.step, Step())
        if report.attempt != step.attempt or report.pnode in step.reports:
            return []
        self.news += 1
        step.reports[report.pnode] = report
        if len(step.reports) < len(self.hosts):
            return []
        return [*self._decide(step, now), *self.pump()]

    def decided(self, done: StepDone, now: float) -> list[Command]:
        """The PNode that holds the whole network finished a step."""
        if not self.plan.decides or not self.done < done.step <= self.limit:
            return []
        step = self._steps.setdefault(done.step, Step())
        self.news += step.done is None
        step.done = done
        commands = self._take_in_order(now)
        missing = self._steps.get(self.done + 1)
        if missing and missing.fed and self.done + 1 < done.step:
            commands += self._hops(self.done + 1, missing, 0)
        return commands + self.pump()

    def _take_in_order(self, now: float) -> list[Command]:
        """Steps that are done, and of which all before them are: the time since the last one is divided among them."""
        ready: list[StepDone] = []
        while (step := self._steps.get(self.done + 1 + len(ready))) and step.done:
            ready.append(step.done)
        seconds = (now - self._completed_at) / max(1, len(ready))
        rows = [self._row(done, seconds) for done in ready]
        for row, done in zip(rows, ready, strict=True):
            self._finish(row, scaler_of(done.state), now)
        return [Measured(row) for row in rows]

    def _read(self, number: int) -> ReadBatch:
        plan = self.plan
        return ReadBatch(plan.address.session, plan.address.epoch, plan.dataset, plan.seed, number, plan.batch, plan.feeds.seq_len)

    def _room(self) -> bool:
        return self.plan.decides or sum(len(step.in_flight) for step in self._steps.values()) < self.plan.window

    def _through(self, step: Step, micro: int) -> bool:
        return all((cost, micro) in step.losses for cost in self.plan.costs)

    def _feed(self, number: int, step: Step) -> list[Command]:
        micro = step.fed
        step.fed += 1
        self.news += 1
        self._begun = max(self._begun, number)
        if not self._through(step, micro):
            step.in_flight.add(micro)
        return self._hops(number, step, micro)

    def _hops(self, number: int, step: Step, micro: int) -> list[Command]:
        at = (micro, self.plan.micro_batches)
        hops = micro_hops(self._batches[number], self.plan.feeds, self.plan.address, number, step.attempt, at)
        return [SendHop(to, hop, payload) for to, hop, payload in hops]

    def _decide(self, step: Step, now: float) -> list[Command]:
        for report in step.reports.values():
            step.losses.update({(cost, micro): loss for cost, micro, loss in report.losses})
        norms = {node: value for report in step.reports.values() for node, value in report.squared_norms.items()}
        finite = all(report.finite for report in step.reports.values())
        plan, number = self.plan, self.done + 1
        verdict = decide(plan.hyper, plan.steps, number, self.scaler, [norms[node] for node in plan.order if node in norms], finite)
        loss, at = step_loss(step.losses, plan.costs), plan.address
        save = plan.hyper.saves(number, now - self._saved_at)
        self.decision = Decision(
            at.session, at.epoch, number, verdict.skip, verdict.lr, verdict.lr_factor, verdict.grad_factor, loss, verdict.grad_norm,
            self.scaler.loss_scale, scaler_fields(verdict.state), save,
        )  # fmt: skip
        done = StepDone(
            at.sender, at.session, at.epoch, number, loss, verdict.grad_norm, verdict.skip, verdict.lr, self.scaler.loss_scale, {}
        )
        row = self._row(done, now - self._completed_at)
        self._finish(row, verdict.state, now)
        if save:
            self._saved_at = now
        return [self._broadcast(self.decision), Measured(row)]

    def _row(self, done: StepDone, seconds: float) -> StepMetrics:
        seconds = max(1e-6, seconds)
        speed = self.plan.batch * self.plan.feeds.seq_len / seconds
        mfu = None if self.plan.peak_share is None else self.plan.peak_share * speed
        return StepMetrics(
            done.session, done.step, done.loss, done.lr, done.grad_norm, done.loss_scale, done.skipped, speed, seconds * 1000,
            done.epoch, mfu,
        )  # fmt: skip

    def _finish(self, row: StepMetrics, after: ScalerState, now: float) -> None:
        self._steps.pop(row.step, None)
        self._batches.pop(row.step, None)
        stuck = row.skipped and (not after.dynamic or after.loss_scale <= MIN_LOSS_SCALE)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if stuck else 0
        self.done, self.scaler, self.loss, self._completed_at = row.step, after, row.loss, now
        self.news += 1

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
