"""A part of a network that generates, on one PNode: pieces of sequences go forward through its segments.

Rule 1: a sequence has a slot, of `Deploy.batch`; what is kept of it there is written over by the next sequence, so nothing has to be
released, and a lost message leaks nothing.
Rule 2: (slot, attempt, position) names a piece. The first one of a newer attempt makes everything older in its slot nothing.
Rule 3: a piece that does not begin where its attempt has been read to is dropped: whoever lost what came before begins anew.
Rule 4: a piece goes through a segment when all that enters there has come. Pieces take turns, in the order in which they are complete.
Rule 5: nothing is kept beyond a piece but its caches; nothing is reported but the deploy and what fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from dcnr.agents.commands import Command, Job, Read, SendHop, SendReport
from dcnr.agents.events import Handoff, JobFailed, ReadDone, SetupFailed
from dcnr.agents.plan import Plan
from dcnr.agents.routing import ExternalInput, Local, Remote
from dcnr.agents.telemetry import IN_PLACE, Reason, Telemetry
from dcnr.backends.base import Array
from dcnr.bus.messages import Deploy, Deployed, Failed, Hop, Hosted, Report, Slot
from dcnr.errors import InvariantError
from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Consumer

REPEAT_AFTER = 1.0
"""Seconds until a failure that nobody has heeded is said again."""


class State(Enum):
    """What it waits for."""

    PREPARING = auto()
    """Its graph and routes."""
    INSTALLING = auto()
    """Its arrays and subscriptions."""
    SERVING = auto()
    """Pieces."""
    FAILED = auto()
    """Somebody to let go of it."""


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.PREPARING: frozenset({State.INSTALLING, State.FAILED}),
    State.INSTALLING: frozenset({State.SERVING, State.FAILED}),
    State.SERVING: frozenset({State.FAILED}),
    State.FAILED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Some positions of the sequence in a slot."""

    slot: int
    attempt: int
    position: int
    caches: bool


@dataclass(slots=True)
class Sequence:
    """What has come of the newest attempt of a slot."""

    attempt: int = -1
    read: dict[int, int] = field(default_factory=dict)
    """By segment: the position at which the next piece begins, or the first one that it may begin at."""
    waiting: dict[tuple[int, Piece], dict[int, Array]] = field(default_factory=dict)
    """By segment and piece: its inputs that are there."""


class HostedReading:
    """The machine of one (session, epoch) that generates. Its owner passes it what concerns it, and fetches its jobs with `next_job`."""

    def __init__(self, me: PNodeId, deploy: Deploy, telemetry: Telemetry) -> None:
        self.deploy = deploy
        self.state = State.PREPARING
        self.plan: Plan | None = None
        self._me = me
        self._telemetry = telemetry
        self._window = 0
        self._sequences = [Sequence() for _ in range(deploy.batch)]
        self._ready: deque[Read] = deque()
        self._jobs = 0
        """Given out and not answered."""
        self._work = 0
        """Answered jobs."""
        self._repeat: tuple[Report, float] | None = None

    @property
    def bytes(self) -> int:
        """What it takes of this PNode's memory."""
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
        """Where it stands, for the heartbeat; `sending`: hops of it are on their way."""
        setting_up = self.state in (State.PREPARING, State.INSTALLING)
        return Hosted(
            session=self.deploy.session, epoch=self.deploy.epoch, step=self.deploy.step, vnodes=len(self.nodes), bytes=self.bytes,
            work=self._work, busy=sending or setting_up or bool(self._jobs or self._ready),
        )  # fmt: skip

    # -- deploy -------------------------------------------------------------------------------------------------------

    def prepared(self, plan: Plan) -> None:
        """Its part is known, and fits."""
        self.plan = plan
        self._window = next((node.input_shapes[0][0] for node in plan.graph.nodes if None in node.inputs), 0)
        self._go(State.INSTALLING)

    def installed(self) -> list[Command]:
        """Its part is in place."""
        if self.state is not State.INSTALLING:
            return []
        self._go(State.SERVING)
        return self.deployed_again()

    def deployed_again(self) -> list[Command]:
        """The answer to its deploy, as far as there is one."""
        if self.state is State.SERVING:
            return [self._report(Deployed(self._me, self.deploy.session, self.deploy.epoch, self.deploy.step, self.bytes))]
        return [self._report(self._repeat[0])] if self._repeat else []

    def failed(self, event: SetupFailed | JobFailed, now: float) -> list[Command]:
        """It cannot go on; said until somebody lets go of it."""
        if self.state is State.FAILED:
            return []
        self._go(State.FAILED)
        self._ready.clear()
        self._sequences = [Sequence() for _ in self._sequences]
        failed = Failed(self._me, self.deploy.session, self.deploy.epoch, event.message, event.traceback, event.world)
        self._repeat = (failed, now + REPEAT_AFTER)
        return [self._report(failed)]

    # -- pieces -------------------------------------------------------------------------------------------------------

    def hop(self, hop: Hop, payload: Array) -> list[Command]:
        """A tensor came over the wire, of this epoch."""
        if self.plan is None or self.state is not State.SERVING:
            self._telemetry.drop("unknown")
            return []
        self._telemetry.receive(hop.lane.partition(":")[0], payload.nbytes)
        piece = Piece(hop.micro, hop.attempt, hop.step, hop.caches)
        inputs = self.plan.routes.inputs if hop.phase == "fwd" else {}
        for place in dict.fromkeys(inputs.get(Consumer(*target)) for target in hop.targets):
            problem: Reason | None = "unknown" if place is None else self._offer(place, piece, payload)
            if problem is not None:
                self._telemetry.drop(problem)
        return []

    def _offer(self, place: Local, piece: Piece, tensor: Array) -> Reason | None:
        """Take one input of a segment; returns why it has no effect, if so."""
        entry = self._entries(place.segment)[place.index]
        if not 0 <= piece.slot < len(self._sequences) or not self._fits(piece, entry, tensor):
            return "malformed"
        sequence = self._sequences[piece.slot]
        if piece.attempt > sequence.attempt:
            sequence = self._begin(piece)
        read = sequence.read.get(place.segment, 0)
        if piece.attempt < sequence.attempt or piece.position < read or (self._counts(entry) and piece.position > read):
            return "stale"
        there = sequence.waiting.setdefault((place.segment, piece), {})
        if place.index in there:
            return "duplicate"
        there[place.index] = tensor
        if len(there) == len(self._entries(place.segment)):
            del sequence.waiting[place.segment, piece]
            self._complete(place.segment, piece, tuple(there[index] for index in range(len(there))))
        return None

    def _begin(self, piece: Piece) -> Sequence:
        """A newer attempt: what is older in its slot is nothing."""
        self._ready = deque(job for job in self._ready if job.slot != piece.slot)
        sequence = self._sequences[piece.slot] = Sequence(piece.attempt)
        return sequence

    def _complete(self, segment: int, piece: Piece, inputs: tuple[Array, ...]) -> None:
        """All that enters is there. A piece of which only the last position comes here may begin anywhere further on."""
        counted = (tensor.shape[1] for tensor, entry in zip(inputs, self._entries(segment), strict=True) if self._counts(entry))
        length = next(counted, 1)
        self._sequences[piece.slot].read[segment] = piece.position + length
        of = (self.deploy.session, self.deploy.epoch, segment, piece.slot, piece.attempt, piece.position, piece.caches)
        self._ready.append(Read(*of, inputs))

    def _entries(self, segment: int) -> tuple[ExternalInput, ...]:
        assert self.plan is not None
        return next(routes.inputs for routes in self.plan.routes.segments if routes.index == segment)

    def _counts(self, entry: ExternalInput) -> bool:
        """Whether it has a row for every position, and not for the last one alone."""
        return entry.shape[0] == self._window

    def _fits(self, piece: Piece, entry: ExternalInput, tensor: Array) -> bool:
        """One sequence, rows as its piece has positions, of what its maker stores."""
        assert self.plan is not None
        maker = None if entry.port is None else self.plan.graph.by_id[entry.port.node]
        dtype = "int64" if maker is None else maker.activation_precision
        if len(tensor.shape) != 1 + len(entry.shape) or tensor.shape[0] != 1 or tensor.shape[2:] != entry.shape[1:]:
            return False
        length = tensor.shape[1]
        room = self._window - piece.position if self._counts(entry) else entry.shape[0]
        return bool(tensor.dtype.name == dtype and piece.position >= 0 and piece.attempt >= 0 and 1 <= length <= room)

    def done(self, event: ReadDone) -> list[Command]:
        """A piece went through a segment: hand on what it gave."""
        if self.plan is None or self.state is not State.SERVING or event.attempt != self._sequences[event.slot].attempt:
            return []
        piece = Piece(event.slot, event.attempt, event.position, event.caches)
        routes = next(routes for routes in self.plan.routes.segments if routes.index == event.segment)
        commands: list[Command] = []
        for output, handoff in zip(routes.outputs, event.outputs, strict=True):
            for local in output.local:
                self._telemetry.receive(IN_PLACE, handoff.array.nbytes)
                problem = self._offer(local, piece, handoff.array)
                if problem is not None:
                    self._telemetry.drop(problem)
            commands += [self._send(piece, (output.port.node, output.port.slot), remote, handoff) for remote in output.remote]
        return commands

    def _send(self, piece: Piece, source: Slot, to: Remote, handoff: Handoff) -> Command:
        assert self.plan is not None
        payload = handoff.array if to.pnode in self.plan.near else handoff.host
        if payload is None:
            raise InvariantError(f"a tensor of {source[0]} for another PNode is not in host memory")
        self._telemetry.send(to.pnode, payload.nbytes)
        hop = Hop(
            network=self.deploy.network, session=self.deploy.session, epoch=self.deploy.epoch, step=piece.position, micro=piece.slot,
            attempt=piece.attempt, phase="fwd", source=source[0], source_slot=source[1], targets=to.targets, sender=self._me,
            dtype=payload.dtype.name, shape=payload.shape, nbytes=payload.nbytes, caches=piece.caches,
            codec="raw" if to.pnode == self.deploy.reader else self.plan.graph.wire,
        )  # fmt: skip
        return SendHop(to.pnode, hop, payload)

    # -- work and reports ---------------------------------------------------------------------------------------------

    def next_job(self, now: float) -> Job | None:
        """The piece whose turn it is, taken out; None if there is none."""
        if not self._ready:
            return None
        self._jobs += 1
        return self._ready.popleft()

    def answered(self) -> None:
        """A job was done, or failed."""
        self._jobs -= 1
        self._work += 1

    def deadline(self) -> float | None:
        """When a report must be repeated."""
        return self._repeat[1] if self._repeat else None

    def tick(self, now: float) -> list[Command]:
        """Repeat what had no effect yet."""
        if self._repeat is None or now < self._repeat[1]:
            return []
        self._repeat = (self._repeat[0], now + REPEAT_AFTER)
        return [self._report(self._repeat[0])]

    def validate(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        if self._jobs < 0 or (self._repeat is not None) != (self.state is State.FAILED):
            raise InvariantError(f"{self.deploy.session}: {self._jobs} jobs at work, {self.state}")
        for slot, sequence in enumerate(self._sequences):
            attempts = {piece.attempt for _, piece in sequence.waiting} | {job.attempt for job in self._ready if job.slot == slot}
            if attempts - {sequence.attempt}:
                raise InvariantError(f"{self.deploy.session}: slot {slot} is at attempt {sequence.attempt}, and holds {attempts}")

    def _report(self, report: Report) -> Command:
        return SendReport(self.deploy.network, report)

    def _go(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise InvariantError(f"{self.deploy.session}: from {self.state} to {state}")
        self.state = state
