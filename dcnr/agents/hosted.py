"""One session on one PNode: deploy, then step after step, with a checkpoint now and then.

Rule 1: everything is queued to one compute thread that works in order, so a step may be folded, decided and applied as soon as its last
backward is queued, and the next step's forward right behind.
Rule 2: a report that must arrive is repeated until its effect is seen; the last `StepDone` for as long as no newer one follows.
Rule 3: a decision counts once, and only for the step that was reported.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import Enum, auto
from typing import TypeVar

from dcnr.agents.commands import Apply, Command, Fold, Job, Pass, SendHop, SendReport, Settle, Snapshot, Upload
from dcnr.agents.events import Folded, Handoff, PassDone, Settled, SnapshotTaken
from dcnr.agents.plan import Plan, micro_rows
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
    Failed,
    Hop,
    Hosted,
    Loss,
    Report,
    Saved,
    SavedPart,
    Slot,
    StepDone,
    StepReport,
)
from dcnr.bus.subjects import Phase
from dcnr.errors import InvariantError
from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Consumer, Graph, Port
from dcnr.optim.decide import in_order

REPEAT_AFTER = 1.0
"""Seconds until a report that had no effect is sent again."""
REMEMBERED = 32
"""Finished steps and checkpoints whose report can be sent again."""

R = TypeVar("R")


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
    State.FOLDING: frozenset({State.REPORTED, State.FAILED}),
    State.REPORTED: frozenset({State.STEPPING, State.FAILED}),
    State.FAILED: frozenset(),
}
RUNNING = frozenset({State.STEPPING, State.FOLDING, State.REPORTED})


class HostedSession:
    """The machine of one (session, epoch). Its owner passes it what concerns it, and fetches its jobs with `next_job`."""

    def __init__(self, me: PNodeId, deploy: Deploy, telemetry: Telemetry) -> None:
        self.deploy = deploy
        self.state = State.PREPARING
        self.step = deploy.step
        """The last step that was decided here."""
        self.plan: Plan | None = None
        self._me = me
        self._telemetry = telemetry
        self._segments: dict[int, Segment] = {}
        self._pending: deque[Job] = deque()
        self._losses: dict[int, dict[tuple[NodeId, int], float]] = {}
        """By step, then by (cost, micro-batch)."""
        self._checkpoint_every = int(deploy.hyper.get("checkpoint_every") or 0)
        self._repeat: tuple[Report, float] | None = None
        self._finished: OrderedDict[int, StepDone] = OrderedDict()
        self._saving: set[int] = set()
        self._saved: OrderedDict[int, Saved] = OrderedDict()
        self._attempt = 0
        """Of the step under way."""

    @property
    def bytes(self) -> int:
        """What it takes of this PNode's memory."""
        return self.plan.bytes if self.plan else 0

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Its VNodes here."""
        return self.plan.routes.hosted if self.plan else ()

    def hosted(self) -> Hosted:
        """Where it stands, for the heartbeat."""
        return Hosted(self.deploy.session, self.deploy.epoch, self.step, len(self.nodes), self.bytes)

    # -- deploy -------------------------------------------------------------------------------------------------------

    def prepared(self, plan: Plan) -> None:
        """Its part is known, and fits."""
        self.plan = plan
        self._segments = {routes.index: Segment(routes, self.deploy.micro_batches, self.step) for routes in plan.routes.segments}
        self._go(State.INSTALLING)

    def installed(self) -> list[Command]:
        """Its part is in place."""
        if self.state is not State.INSTALLING:
            return []
        self._go(State.STEPPING)
        self._end_step_if_done()
        return self.deployed_again()

    def deployed_again(self) -> list[Command]:
        """The answer to its deploy, as far as there is one."""
        if self.state in RUNNING:
            return [self._report(Deployed(self._me, self.deploy.session, self.deploy.epoch, self.step, self.bytes))]
        return [self._report(self._repeat[0])] if self._repeat else []

    def failed(self, message: str, traceback: str, now: float) -> list[Command]:
        """It cannot go on; said until somebody lets go of it."""
        if self.state is State.FAILED:
            return []
        self._go(State.FAILED)
        self._pending.clear()
        self._segments.clear()
        return [self._repeated(Failed(self._me, self.deploy.session, self.deploy.epoch, message, traceback), now)]

    # -- tensors ------------------------------------------------------------------------------------------------------

    def hop(self, hop: Hop, payload: Array) -> list[Command]:
        """A tensor came over the wire, of this epoch."""
        if self.plan is None or self.state not in RUNNING:
            self._telemetry.drop("unknown")
            return []
        self._telemetry.receive(hop.lane.partition(":")[0], payload.nbytes)
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
            elif (payload.shape, payload.dtype.name) != self._kind(self.plan.graph, hop, place) or not 0 <= hop.weight < math.inf:
                self._telemetry.drop("malformed")
            else:
                self._offer(hop.phase, place, Turn(hop.step, hop.micro), hop.attempt, payload, hop.weight)
        return []

    def _kind(self, graph: Graph, hop: Hop, place: Local) -> tuple[tuple[int, ...], str]:
        """(shape, dtype) of the tensor for a place: what its maker stores, or the trainer's ids."""
        routes = self._segments[place.segment].routes
        if hop.phase == "fwd":
            entry = routes.inputs[place.index]
            shape, maker = entry.shape, None if entry.port is None else entry.port.node
        else:
            use = routes.incoming[place.index].use
            shape, maker = graph.by_id[use.port.node].output_shapes[use.port.slot], use.consumer.node
        first, last = micro_rows(self.deploy.batch, self.deploy.micro_batches, hop.micro)
        return (last - first, *shape), "int64" if maker is None else graph.by_id[maker].activation_precision

    def _offer(self, phase: Phase, place: Local, turn: Turn, attempt: int, tensor: Array, weight: float) -> None:
        match self._segments[place.segment].offer(phase, turn, attempt, place.index, tensor, weight):
            case Offer.STALE:
                self._telemetry.drop("stale")
            case Offer.DUPLICATE:
                self._telemetry.drop("duplicate")
            case Offer.TAKEN:
                pass

    def passed(self, done: PassDone) -> list[Command]:
        """A micro-batch went through a segment: hand on what it gave."""
        segment = self._segments.get(done.segment)
        if segment is None:
            return []
        turn = Turn(done.step, done.micro)
        commands = self._note_losses(turn, done.losses)
        for output, handoff in zip(segment.routes.outputs, done.outputs, strict=False):  # none, if no forward ran
            destinations: tuple[Local | Remote, ...] = (*output.local, *output.remote)
            for to in destinations:
                commands += self._hand_on("fwd", turn, (output.port.node, output.port.slot), to, handoff)
        for gradient, handoff in zip(segment.routes.outgoing, done.gradients, strict=False):
            consumer = gradient.use.consumer
            commands += self._hand_on("bwd", turn, (consumer.node, consumer.slot), gradient.to, handoff)
        return commands

    def _note_losses(self, turn: Turn, losses: Sequence[tuple[NodeId, float]]) -> list[Command]:
        for cost, loss in losses:
            self._losses.setdefault(turn.step, {})[cost, turn.micro] = loss
        of = (self._me, self.deploy.session, self.deploy.epoch, turn.step, self._attempt)
        return [self._report(Loss(*of, cost, turn.micro, loss)) for cost, loss in losses]

    def _hand_on(self, phase: Phase, turn: Turn, source: Slot, to: Local | Remote, handoff: Handoff) -> list[Command]:
        if isinstance(to, Local):
            self._telemetry.receive(IN_PLACE, handoff.array.nbytes)
            self._offer(phase, to, turn, self._attempt, handoff.array, 0.0)
            return []
        near = self.plan is not None and to.pnode in self.plan.near
        payload = handoff.array if near else handoff.host
        if payload is None:
            raise InvariantError(f"a tensor of {source[0]} for another PNode is not in host memory")
        self._telemetry.send(to.pnode, payload.nbytes)
        hop = Hop(
            network=self.deploy.network, session=self.deploy.session, epoch=self.deploy.epoch,
            step=turn.step, micro=turn.micro, attempt=self._attempt, phase=phase,
            source=source[0], source_slot=source[1], targets=to.targets, sender=self._me,
            dtype=payload.dtype.name, shape=payload.shape, nbytes=payload.nbytes,
            codec=self.plan.graph.wire if self.plan else "raw",
        )  # fmt: skip
        return [SendHop(to.pnode, hop, payload)]

    # -- work ---------------------------------------------------------------------------------------------------------

    def next_job(self) -> Job | None:
        """The most urgent work, taken out; None if there is none."""
        if self._pending:
            return self._pending.popleft()
        if self.state is not State.STEPPING:
            return None
        ready = [(priority, index) for index, segment in self._segments.items() if (priority := segment.priority()) is not None]
        if not ready:
            return None
        work = self._segments[min(ready)[1]].take()
        session, epoch = self.deploy.session, self.deploy.epoch
        job = Pass(session, epoch, work.segment, work.turn.step, work.turn.micro, work.inputs, work.weights, work.gradients)
        self._end_step_if_done()
        return job

    def _end_step_if_done(self) -> None:
        """Queue what ends a step, once its last backward was given out."""
        step = self.step + 1
        if step > self.deploy.total_steps or not all(segment.done() for segment in self._segments.values()):
            return
        if self.deploy.decides:
            self._pending.append(Settle(self.deploy.session, self.deploy.epoch, step))
            self._decided(step)
        else:
            self._pending.append(Fold(self.deploy.session, self.deploy.epoch, step))
            self._go(State.FOLDING)

    def _decided(self, step: int) -> None:
        self.step = step
        for segment in self._segments.values():
            segment.decide(step)
        if self._checkpoint_every and step % self._checkpoint_every == 0:
            self._snapshot(step)

    # -- the end of a step --------------------------------------------------------------------------------------------

    def folded(self, event: Folded, now: float) -> list[Command]:
        """The gradients of the step are measured: report."""
        if self.state is not State.FOLDING:
            return []
        self._go(State.REPORTED)
        report = StepReport(
            pnode=self._me, session=self.deploy.session, epoch=self.deploy.epoch, step=event.step, attempt=self._attempt,
            squared_norms={str(node): squares for node, squares in event.squared_norms.items()}, finite=event.finite,
            losses=tuple((cost, micro, loss) for (cost, micro), loss in self._losses.pop(event.step, {}).items()),
        )  # fmt: skip
        return [self._repeated(report, now)]

    def decision(self, decision: Decision) -> list[Command]:
        """Apply or skip, once, and go on."""
        if self.state is not State.REPORTED or decision.step != self.step + 1:
            self._telemetry.drop("stale")
            return []
        self._repeat = None
        self._pending.append(Apply(self.deploy.session, self.deploy.epoch, decision))
        self._go(State.STEPPING)
        self._decided(decision.step)
        self._end_step_if_done()
        return []

    def settled(self, event: Settled, now: float) -> list[Command]:
        """A step was decided and applied here: say so."""
        if self.state is State.FAILED:
            return []
        verdict = event.verdict
        done = StepDone(
            pnode=self._me, session=self.deploy.session, epoch=self.deploy.epoch, step=event.step,
            loss=self._step_loss(event), grad_norm=verdict.grad_norm, skipped=verdict.skip,
            lr=verdict.lr, loss_scale=event.loss_scale, state=asdict(verdict.state),
        )  # fmt: skip
        _remember(self._finished, event.step, done)
        return [self._repeated(done, now)]

    def _step_loss(self, event: Settled) -> float:
        """Per cost the sum over its micro-batches in order, and those summed in node order: as the trainer adds them."""
        losses = {(cost, micro): loss for cost, micro, loss in event.losses}
        costs = [cost for routes in self._segments.values() for cost in routes.routes.costs]
        return in_order(in_order(losses[key] for key in sorted(losses) if key[0] == cost) for cost in costs)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, step: int) -> list[Command]:
        """The orchestrator wants a checkpoint of the present state, or to hear again of an older one."""
        if step in self._saved:
            return [self._report(self._saved[step])]
        if self.state not in RUNNING or step != self.step:
            self._telemetry.drop("stale")
        elif step not in self._saving:
            self._snapshot(step)
        return []

    def _snapshot(self, step: int) -> None:
        self._saving.add(step)
        self._pending.append(Snapshot(self.deploy.session, self.deploy.epoch, step))

    def snapshot_taken(self, event: SnapshotTaken) -> list[Command]:
        """The state is copied: upload it behind the next steps."""
        state = asdict(event.state) if self.deploy.decides else None
        return [Upload(self.deploy.session, self.deploy.epoch, event.step, self.deploy.storage, event.tensors, state)]

    def uploaded(self, step: int, part: SavedPart, state: dict[str, int | float] | None) -> list[Command]:
        """The part lies in storage."""
        self._saving.discard(step)
        saved = Saved(self._me, self.deploy.session, self.deploy.epoch, step, part, state)
        _remember(self._saved, step, saved)
        return [self._report(saved)]

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


def _remember(memory: OrderedDict[int, R], step: int, report: R) -> None:
    memory[step] = report
    while len(memory) > REMEMBERED:
        memory.popitem(last=False)
