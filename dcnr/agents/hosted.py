"""One session on one PNode: deploy, then step after step, with a checkpoint now and then.

Rule 1: everything is queued to one compute thread that works in order, so a step may be folded, decided and applied as soon as its last
backward is queued, and the next step's forward right behind.
Rule 2: a report that must arrive is repeated until its effect is seen; the last `StepDone` for as long as no newer one follows.
Rule 3: a decision counts once, and only for the step that was reported.
Rule 4: an undecided step has an attempt. A hop of a newer one makes the step begin anew here, as if nothing of it had ever come; hops and
answers of an older one change nothing. Where steps are decided here, one whose last backward was given out is decided, whatever comes.
Rule 5: between two steps a validation may go through (`evaluation`): behind what ended the one, before anything of the other.
Rule 6: what belongs to a checkpoint never stops training: a copy that cannot be uploaded is said and kept.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum, auto

from dcnr.agents.commands import Abort, Apply, Command, Evaluate, Fold, Job, Pass, SendHop, SendReport, Settle, Snapshot, Tensors
from dcnr.agents.copies import Copies, Copy
from dcnr.agents.evaluation import Evaluation, Validated
from dcnr.agents.events import Evaluated, Folded, Handoff, JobFailed, PassDone, Settled, SetupFailed, SnapshotTaken
from dcnr.agents.plan import Plan, fits
from dcnr.agents.routing import Local, Remote, Use
from dcnr.agents.segment import Segment
from dcnr.agents.telemetry import IN_PLACE, Telemetry
from dcnr.agents.vnode import Offer, Turn
from dcnr.backends.base import Array
from dcnr.bus.messages import (
    TRAINER,
    Decision,
    Deploy,
    Deployed,
    EvalLoss,
    Failed,
    Hop,
    Hosted,
    Loss,
    Report,
    Slot,
    StepDone,
    StepReport,
)
from dcnr.bus.subjects import Phase
from dcnr.errors import InvariantError
from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Consumer, Port
from dcnr.optim.decide import in_order

REPEAT_AFTER = 1.0
"""Seconds until a report that had no effect is sent again."""
REMEMBERED = 32
"""Finished steps whose report can be sent again."""


class State(Enum):
    """What the session waits for."""

    PREPARING = auto()
    """Its graph and routes."""
    INSTALLING = auto()
    """Its arrays and subscriptions."""
    STEPPING = auto()
    """Tensors."""
    FOLDING = auto()
    """The gradients of a step."""
    REPORTED = auto()
    """The decision."""
    FAILED = auto()
    """Somebody to let go of it."""


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.PREPARING: frozenset({State.INSTALLING, State.FAILED}),
    State.INSTALLING: frozenset({State.STEPPING, State.FAILED}),
    State.STEPPING: frozenset({State.FOLDING, State.FAILED}),
    State.FOLDING: frozenset({State.REPORTED, State.STEPPING, State.FAILED}),
    State.REPORTED: frozenset({State.STEPPING, State.FAILED}),
    State.FAILED: frozenset(),
}
SETTING_UP = frozenset({State.PREPARING, State.INSTALLING})
RUNNING = frozenset({State.STEPPING, State.FOLDING, State.REPORTED})


class HostedSession:
    """The machine of one (session, epoch). Its owner passes it what concerns it, and fetches its jobs with `next_job`.

    `inherited`: the copy of the state to begin with that an older epoch left, if any.
    """

    def __init__(self, me: PNodeId, deploy: Deploy, telemetry: Telemetry, inherited: Copy | None = None) -> None:
        self.deploy = deploy
        self.state = State.PREPARING
        self.step = deploy.step
        """The last step that was decided here."""
        self.plan: Plan | None = None
        self.copies = Copies(me, deploy, inherited)
        self._me = me
        self._telemetry = telemetry
        self._segments: dict[int, Segment] = {}
        self._evaluation = Evaluation(())
        self._pending: deque[Job] = deque()
        self._losses: dict[int, dict[tuple[NodeId, int], float]] = {}
        """By step, then by (cost, micro-batch)."""
        self._attempts: dict[int, int] = {}
        """Of undecided steps, where it is not 0."""
        self._last: Decision | None = None
        """The newest that is known here."""
        self._jobs = 0
        """Given out and not answered."""
        self._work = 0
        """Answered jobs."""
        self._repeat: tuple[Report, float] | None = None
        self._finished: OrderedDict[int, StepDone] = OrderedDict()
        self._copying: set[int] = set()
        """Steps whose snapshot is queued."""
        self._copied_at = 0.0
        """When it was last decided here to save."""

    @property
    def bytes(self) -> int:
        """What it takes of this PNode's memory. Copies are beside it: host memory for at most `KEPT` times parameters and moments."""
        return self.plan.bytes if self.plan else 0

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Its VNodes here."""
        return self.plan.routes.hosted if self.plan else ()

    @property
    def prepares(self) -> bool:
        """Whether its part is still to be found out."""
        return self.state is State.PREPARING

    def hosted(self, sending: bool) -> Hosted:
        """Where it stands, for the heartbeat; `sending`: hops of it are on their way. The attempt is the largest of undecided steps."""
        return Hosted(
            session=self.deploy.session, epoch=self.deploy.epoch, step=self._last.step if self._last else self.deploy.step,
            vnodes=len(self.nodes), bytes=self.bytes, attempt=max([*self._attempts.values(), self._evaluation.attempt]),
            work=self._work, busy=sending or self._busy(), last=self._last,
        )  # fmt: skip

    def _busy(self) -> bool:
        if self.state in SETTING_UP or self._jobs or self._pending:
            return True
        runs = self._evaluation.ready(self.step) or any(segment.priority() is not None for segment in self._segments.values())
        return self.state is State.STEPPING and runs

    # -- deploy -------------------------------------------------------------------------------------------------------

    def prepared(self, plan: Plan) -> None:
        """Its part is known, and fits."""
        self.plan = plan
        self._segments = {routes.index: Segment(routes, self.deploy.micro_batches, self.step) for routes in plan.routes.segments}
        self._evaluation = Evaluation(plan.routes.segments)
        self._go(State.INSTALLING)

    def installed(self, tensors: Tensors | None, now: float) -> list[Command]:
        """Its part is in place, loaded from `tensors`, which stay as the copy to go back to; None if from the seed."""
        if self.state is not State.INSTALLING:
            return []
        self._go(State.STEPPING)
        self._copied_at = now
        self.copies.begin(tensors)
        self._end_step_if_done(now)
        return self.deployed_again()

    def deployed_again(self) -> list[Command]:
        """The answer to its deploy, as far as there is one."""
        if self.state in RUNNING:
            return [self._report(Deployed(self._me, self.deploy.session, self.deploy.epoch, self.step, self.bytes))]
        return [self._report(self._repeat[0])] if self._repeat else []

    def failed(self, event: SetupFailed | JobFailed, now: float) -> list[Command]:
        """It cannot go on; said until somebody lets go of it."""
        if self.state is State.FAILED:
            return []
        self._go(State.FAILED)
        self._pending.clear()
        self._segments.clear()
        failed = Failed(self._me, self.deploy.session, self.deploy.epoch, event.message, event.traceback, event.world)
        return [self._repeated(failed, now)]

    # -- tensors ------------------------------------------------------------------------------------------------------

    def hop(self, hop: Hop, payload: Array) -> list[Command]:
        """A tensor came over the wire, of this epoch."""
        if self.plan is None or self.state not in RUNNING:
            self._telemetry.drop("unknown")
            return []
        self._telemetry.receive(hop.lane.partition(":")[0], payload.nbytes)
        if hop.phase == "eval":
            self._validation_hop(self.plan, hop, payload)
            return []
        if hop.source == TRAINER and hop.step in self._finished and hop.micro == 0:
            self._telemetry.drop("stale")
            return [self._report(self._finished[hop.step])]
        inputs, gradients = self.plan.routes.inputs, self.plan.routes.gradients
        if hop.phase == "fwd":
            found = [inputs.get(Consumer(*target)) for target in hop.targets]
        else:
            found = [gradients.get(Use(Port(*target), Consumer(hop.source, hop.source_slot))) for target in hop.targets]
        for place in dict.fromkeys(found):
            if place is None:
                self._telemetry.drop("unknown")
            elif not self._fits(self.plan, hop, place, payload):
                self._telemetry.drop("malformed")
            elif not self._takes(hop.step, hop.attempt):
                self._telemetry.drop("stale")
            else:
                self._offer(hop.phase, place, Turn(hop.step, hop.micro), payload, hop.weight)
        return []

    def _validation_hop(self, plan: Plan, hop: Hop, payload: Array) -> None:
        of = Validated(hop.step, hop.attempt, hop.micro)
        for place in dict.fromkeys(plan.routes.inputs.get(Consumer(*target)) for target in hop.targets):
            if place is None:
                self._telemetry.drop("unknown")
            elif not self._fits(plan, hop, place, payload):
                self._telemetry.drop("malformed")
            elif not self._evaluation.takes(of, self.step):
                self._telemetry.drop("stale")
            elif self._evaluation.offer(of, place, payload, hop.weight) is Offer.DUPLICATE:
                self._telemetry.drop("duplicate")

    def _fits(self, plan: Plan, hop: Hop, place: Local, payload: Array) -> bool:
        return fits(plan, self.deploy, (self._segments[place.segment].routes, place.index), hop, payload)

    def _takes(self, step: int, attempt: int) -> bool:
        """Whether a tensor is of the attempt of its step; a newer one begins the step anew."""
        known = self._attempts.get(step, 0)
        if step > self.step and attempt > known:
            self._renew(step, attempt)
            return True
        return attempt == known

    def _renew(self, step: int, attempt: int) -> None:
        """Forget what is here of an undecided step."""
        begun = step == self.step + 1 and any(segment.begun() for segment in self._segments.values())
        self._attempts[step] = attempt
        self._losses.pop(step, None)
        for segment in self._segments.values():
            segment.renew(step)
        if not begun:
            return
        self._pending = deque(job for job in self._pending if not isinstance(job, Fold))
        self._pending.append(Abort(self.deploy.session, self.deploy.epoch, step))
        if self.state is not State.STEPPING:
            self._repeat = None
            self._go(State.STEPPING)

    def _offer(self, phase: Phase, place: Local, turn: Turn, tensor: Array, weight: float) -> None:
        match self._segments[place.segment].offer(phase, turn, place.index, tensor, weight):
            case Offer.STALE:
                self._telemetry.drop("stale")
            case Offer.DUPLICATE:
                self._telemetry.drop("duplicate")
            case Offer.TAKEN:
                pass

    def passed(self, done: PassDone) -> list[Command]:
        """A micro-batch went through a segment: hand on what it gave."""
        segment = self._segments.get(done.segment)
        if segment is None or (done.step > self.step and done.attempt != self._attempts.get(done.step, 0)):
            return []
        commands = self._note_losses(done)
        for output, handoff in zip(segment.routes.outputs, done.outputs, strict=False):  # none, if no forward ran
            destinations: tuple[Local | Remote, ...] = (*output.local, *output.remote)
            for to in destinations:
                commands += self._hand_on("fwd", done, (output.port.node, output.port.slot), to, handoff)
        for gradient, handoff in zip(segment.routes.outgoing, done.gradients, strict=False):
            consumer = gradient.use.consumer
            commands += self._hand_on("bwd", done, (consumer.node, consumer.slot), gradient.to, handoff)
        return commands

    def evaluated(self, done: Evaluated) -> list[Command]:
        """A micro-batch of a validation went through a segment: hand on what it gave, and say its losses."""
        segment = self._segments.get(done.segment)
        if segment is None or not self._evaluation.takes(Validated(done.step, done.attempt, done.micro), self.step):
            return []
        commands: list[Command] = []
        for output, handoff in zip(segment.routes.outputs, done.outputs, strict=True):
            destinations: tuple[Local | Remote, ...] = (*output.local, *output.remote)
            for to in destinations:
                commands += self._hand_on("eval", done, (output.port.node, output.port.slot), to, handoff)
        of = (self._me, self.deploy.session, self.deploy.epoch, done.step)
        return [*commands, *(self._report(EvalLoss(*of, cost, done.micro, loss)) for cost, loss in done.losses)]

    def _note_losses(self, done: PassDone) -> list[Command]:
        for cost, loss in done.losses:
            self._losses.setdefault(done.step, {})[cost, done.micro] = loss
        of = (self._me, self.deploy.session, self.deploy.epoch, done.step, done.attempt)
        return [self._report(Loss(*of, cost, done.micro, loss)) for cost, loss in done.losses]

    def _hand_on(self, phase: Phase, done: PassDone | Evaluated, source: Slot, to: Local | Remote, handoff: Handoff) -> list[Command]:
        if isinstance(to, Local):
            self._telemetry.receive(IN_PLACE, handoff.array.nbytes)
            if phase == "eval":
                self._evaluation.offer(Validated(done.step, done.attempt, done.micro), to, handoff.array, 0.0)
                return []
            self._offer(phase, to, Turn(done.step, done.micro), handoff.array, 0.0)
            return []
        near = self.plan is not None and to.pnode in self.plan.near
        payload = handoff.array if near else handoff.host
        if payload is None:
            raise InvariantError(f"a tensor of {source[0]} for another PNode is not in host memory")
        self._telemetry.send(to.pnode, payload.nbytes)
        hop = Hop(
            network=self.deploy.network, session=self.deploy.session, epoch=self.deploy.epoch,
            step=done.step, micro=done.micro, attempt=done.attempt, phase=phase,
            source=source[0], source_slot=source[1], targets=to.targets, sender=self._me,
            dtype=payload.dtype.name, shape=payload.shape, nbytes=payload.nbytes,
            codec=self.plan.graph.wire if self.plan else "raw",
        )  # fmt: skip
        return [SendHop(to.pnode, hop, payload)]

    # -- work ---------------------------------------------------------------------------------------------------------

    def next_job(self, now: float) -> Job | None:
        """The most urgent work, taken out; None if there is none."""
        job = self._next_job(now)
        self._jobs += job is not None
        return job

    def answered(self) -> None:
        """A job was done, or failed."""
        self._jobs -= 1
        self._work += 1

    def _next_job(self, now: float) -> Job | None:
        if self._pending:
            return self._pending.popleft()
        if self.state is not State.STEPPING:
            return None
        ready = [(priority, index) for index, segment in self._segments.items() if (priority := segment.priority()) is not None]
        if not ready:
            return self._next_evaluation()
        work = self._segments[min(ready)[1]].take()
        of = (self.deploy.session, self.deploy.epoch, work.segment, work.turn.step, work.turn.micro)
        job = Pass(*of, work.inputs, work.weights, work.gradients, self._attempts.get(work.turn.step, 0))
        self._end_step_if_done(now)
        return job

    def _next_evaluation(self) -> Job | None:
        if not self._evaluation.ready(self.step):
            return None
        of, segment, tensors, weights = self._evaluation.take()
        return Evaluate(self.deploy.session, self.deploy.epoch, segment, of.step, of.micro, tensors, weights, of.attempt)

    def _end_step_if_done(self, now: float) -> None:
        """Queue what ends a step, once its last backward was given out."""
        step = self.step + 1
        if step > self.deploy.total_steps or not all(segment.done() for segment in self._segments.values()):
            return
        if self.deploy.decides:
            self._pending.append(Settle(self.deploy.session, self.deploy.epoch, step))
            self._decided(step, self._saves(step, now))
        else:
            self._pending.append(Fold(self.deploy.session, self.deploy.epoch, step, self._attempts.get(step, 0)))
            self._go(State.FOLDING)

    def _saves(self, step: int, now: float) -> bool:
        """Whether to save after `step`, which is decided here."""
        saves = self.plan is not None and self.plan.hyper.saves(step, now - self._copied_at)
        if saves:
            self._copied_at = now
        return saves

    def _decided(self, step: int, save: bool) -> None:
        self.step = step
        self._attempts = {later: attempt for later, attempt in self._attempts.items() if later > step}
        self._evaluation.decide(step)
        for segment in self._segments.values():
            segment.decide(step)
        if save:
            self._snapshot(step)

    # -- the end of a step --------------------------------------------------------------------------------------------

    def folded(self, event: Folded, now: float) -> list[Command]:
        """The gradients of the step are measured: report."""
        if self.state is not State.FOLDING or event.attempt != self._attempts.get(event.step, 0):
            return []
        self._go(State.REPORTED)
        report = StepReport(
            pnode=self._me, session=self.deploy.session, epoch=self.deploy.epoch, step=event.step, attempt=event.attempt,
            squared_norms={str(node): squares for node, squares in event.squared_norms.items()}, finite=event.finite,
            losses=tuple((cost, micro, loss) for (cost, micro), loss in self._losses.pop(event.step, {}).items()),
        )  # fmt: skip
        return [self._repeated(report, now)]

    def decision(self, decision: Decision, now: float) -> list[Command]:
        """Apply or skip, once, and go on."""
        if self.state is not State.REPORTED or decision.step != self.step + 1:
            self._telemetry.drop("stale")
            return []
        if not decision.state.keys() >= self.deploy.state.keys():
            self._telemetry.drop("malformed")
            return []
        self._repeat, self._last = None, decision
        self._pending.append(Apply(self.deploy.session, self.deploy.epoch, decision))
        self._go(State.STEPPING)
        self._decided(decision.step, decision.save)
        self._end_step_if_done(now)
        return []

    def settled(self, event: Settled, now: float) -> list[Command]:
        """A step was decided and applied here: say so."""
        if self.state is State.FAILED:
            return []
        verdict, loss, state = event.verdict, self._step_loss(event), asdict(event.verdict.state)
        self._last = Decision(
            session=self.deploy.session, epoch=self.deploy.epoch, step=event.step, skip=verdict.skip, lr=verdict.lr,
            lr_factor=verdict.lr_factor, grad_factor=verdict.grad_factor, loss=loss, grad_norm=verdict.grad_norm,
            loss_scale=event.loss_scale, state=state, save=event.step in self._copying,
        )  # fmt: skip
        done = StepDone(
            pnode=self._me, session=self.deploy.session, epoch=self.deploy.epoch, step=event.step, loss=loss,
            grad_norm=verdict.grad_norm, skipped=verdict.skip, lr=verdict.lr, loss_scale=event.loss_scale, state=state,
        )  # fmt: skip
        self._finished[event.step] = done
        while len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)
        return [self._repeated(done, now)]

    def _step_loss(self, event: Settled) -> float:
        """Per cost the sum over its micro-batches in order, and those summed in node order: as the trainer adds them."""
        losses = {(cost, micro): loss for cost, micro, loss in event.losses}
        costs = [cost for routes in self._segments.values() for cost in routes.routes.costs]
        return in_order(in_order(losses[key] for key in sorted(losses) if key[0] == cost) for cost in costs)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, step: int) -> list[Command]:
        """The orchestrator wants a checkpoint: of the present state, of a copy that is kept, or to hear again of one that is done."""
        if self.state in RUNNING and (known := self.copies.save(step)) is not None:
            return known
        if self.state not in RUNNING or step != self.step:
            self._telemetry.drop("stale")
        elif step not in self._copying:
            self._snapshot(step)
        return []

    def _snapshot(self, step: int) -> None:
        self._copying.add(step)
        self._pending.append(Snapshot(self.deploy.session, self.deploy.epoch, step))

    def snapshot_taken(self, event: SnapshotTaken) -> list[Command]:
        """The state is copied: upload it behind the next steps."""
        self._copying.discard(event.step)
        return self.copies.taken(Copy(event.step, event.tensors, asdict(event.state) if self.deploy.decides else None))

    # -- reports ------------------------------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        """When a report must be repeated."""
        return self._repeat[1] if self._repeat else None

    def tick(self, now: float) -> list[Command]:
        """Repeat what had no effect yet."""
        if self._repeat is None or now < self._repeat[1]:
            return []
        return [self._repeated(self._repeat[0], now)]

    def validate(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        for segment in self._segments.values():
            segment.validate()
            if any(vnode.decided != self.step for vnode in segment.vnodes.values()):
                raise InvariantError(f"{self.deploy.session}: a VNode is not at step {self.step}")
        self.copies.validate()
        self._evaluation.validate()
        if any(step <= self.step for step in self._attempts) or self._jobs < 0:
            raise InvariantError(f"{self.deploy.session}: attempts {self._attempts} at step {self.step}, {self._jobs} jobs at work")
        if not self.deploy.decides and (self._repeat is not None) != (self.state in (State.REPORTED, State.FAILED)):
            raise InvariantError(f"{self.deploy.session}: {self.state} and its repeated report do not fit")

    def _report(self, report: Report) -> Command:
        return SendReport(self.deploy.network, report)

    def _repeated(self, report: Report, now: float) -> Command:
        self._repeat = (report, now + REPEAT_AFTER)
        return self._report(report)

    def _go(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise InvariantError(f"{self.deploy.session}: from {self.state} to {state}")
        self.state = state
