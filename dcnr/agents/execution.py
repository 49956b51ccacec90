"""One session's arithmetic: runs the programs of its segments over row shards, and ends steps.

Rule 1: on backends that run shards, the rows of a micro-batch are cut into S = min(shards, rows) pieces, whatever the machine; each piece
goes through a whole segment on one thread. Threads only decide how many run at once.
Rule 2: losses and gradients of shards are added in shard order.
Rule 3: nothing here knows other sessions, the bus or the loop; everything runs in the order in which it is called.
Rule 4: nothing here waits for a device: what is not there yet is given as a `Later`. What a segment does forward and backward in one piece
is recorded, where the backend can, so that the device gets it as one piece too.

R rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from dcnr.agents.commands import Evaluate, Pass
from dcnr.agents.crew import Crew
from dcnr.agents.ending import Ending, Later, Settlement, make_ending
from dcnr.agents.events import Handoff
from dcnr.agents.plan import Plan, micro_rows
from dcnr.agents.program import Program, Tape
from dcnr.agents.routing import ExternalInput, IncomingGradient, Local, Remote, SegmentRoutes
from dcnr.agents.weights import Weights
from dcnr.backends.base import Array, Backend, HostArray, Precision, Recording, Scalar
from dcnr.bus.messages import Deploy
from dcnr.ids import NodeId
from dcnr.nodes.base import Env, Shape
from dcnr.optim.decide import ScalerState, in_order
from dcnr.optim.hyper import Hyper
from dcnr.optim.update import StepNumbers

Losses = tuple[tuple[NodeId, int, float], ...]
"""(cost, micro-batch, loss) in the order of segments, then of micro-batches."""


class Results(NamedTuple):
    """Of a pass: external outputs, losses by cost, outgoing gradients; empty for what was not asked for."""

    outputs: tuple[Handoff, ...]
    losses: tuple[tuple[NodeId, float], ...]
    gradients: tuple[Handoff, ...]


class _Made(NamedTuple):
    """The same on the device; `losses` are one per cost."""

    outputs: Sequence[Array]
    losses: Sequence[Scalar]
    gradients: Sequence[Array]


@dataclass(slots=True, eq=False)
class _Replay:
    """A pass of one micro-batch that is recorded: where its inputs must lie, and where its results will."""

    recording: Recording
    inputs: tuple[Array, ...]
    made: _Made


class SegmentRun:
    """One segment's program, its envs by shard, and the tapes of the micro-batches in flight."""

    def __init__(self, program: Program, envs: Sequence[list[Env]], weights: Sequence[Scalar]) -> None:
        self.program = program
        self.envs = envs
        self.weights = weights
        """Of its costs, as `program.weighted`."""
        self.tapes: dict[int, list[Tape]] = {}
        """By micro-batch, then by shard."""
        self.evaluating: list[list[Env]] = []
        """The same envs for validations, once there was one: without dropout and gradients, and with weights of their own."""
        self.replays: dict[int, _Replay] = {}
        """By micro-batch."""
        self.written_forward = 0
        """Shards that had a forward in this step, so that what is accumulated there must be added to."""
        self.written_backward = 0
        """The same of backwards."""


class _Piece(NamedTuple):
    """One row shard: its number, its first row in the batch of the step, its rows in the micro-batch."""

    shard: int
    first_row: int
    rows: slice
    tape: Tape


class Execution:
    """Everything of one (session, epoch) that the compute thread needs."""

    def __init__(self, backend: Backend, crew: Crew, deploy: Deploy, plan: Plan) -> None:
        self._backend = backend
        self._crew = crew
        self._deploy = deploy
        self._plan = plan
        self._hyper = Hyper.model_validate(deploy.hyper)
        self._shards = self._hyper.shards if backend.runs_shards else 1
        learns = frozenset(node for routes in plan.routes.segments for node in routes.backward)
        self._weights = Weights(backend, plan.graph, plan.nodes, learns, self._shards)
        self._segments: dict[int, SegmentRun] = {}
        self._step = backend.scalar(0)
        self._losses: dict[tuple[NodeId, int], Scalar] = {}
        """Of the step under way, by (cost, micro-batch); only where the step is decided here."""
        self._ending: Ending

    @property
    def state(self) -> ScalerState:
        """After the last step that was settled here."""
        return self._ending.state

    def load(self, saved: Mapping[str, HostArray] | None) -> None:
        """Make the arrays and compile the segments."""
        self._weights.load(self._hyper, self._deploy.seed, saved)
        self._ending = make_ending(self._backend, self._crew, self._deploy, self._hyper, self._weights)
        for routes in self._plan.routes.segments:
            program = Program(self._plan.graph, routes, self._plan.nodes)
            envs = [[self._env(node, shard) for node in routes.nodes] for shard in range(self._shards)]
            weights = [self._backend.scalar(0.0) for _ in program.weighted]
            self._segments[routes.index] = SegmentRun(program, envs, weights)

    def _env(self, node: NodeId, shard: int) -> Env:
        return Env(
            backend=self._backend,
            params=self._weights.params[node],
            grads={name: array[shard] for name, array in self._weights.gradients[node].items()},
            accumulate=False,
            activation=self._plan.graph.by_id[node].activation_precision,
            seed=self._deploy.seed,
            step=self._step,
            first_row=0,
            training=True,
            weight=0.0,
            loss_scale=self._ending.loss_scale,
        )

    # -- a micro-batch ------------------------------------------------------------------------------------------------

    def run(self, job: Pass) -> Later[Results]:
        """A micro-batch goes through a segment, as far as `job` asks for."""
        run = self._segments[job.segment]
        self._set_numbers(run, job)
        whole = job.inputs is not None and (job.gradients is not None or not run.program.routes.backward)
        made = self._issue_recorded(run, job) if whole and not self._backend.runs_shards else self._issue(run, job)
        first, last = micro_rows(self._deploy.batch, self._deploy.micro_batches, job.micro)
        shards = len(_cut(last - first, self._shards))
        run.written_forward = max(run.written_forward, shards * (job.inputs is not None))
        run.written_backward = max(run.written_backward, shards * (job.gradients is not None))
        losses = list(zip(run.program.routes.costs, made.losses, strict=False))  # none, without a forward
        if self._deploy.decides:
            self._losses |= {(cost, job.micro): loss for cost, loss in losses}
            losses = []
        return self._handed(run.program.routes, made, losses)

    def _set_numbers(self, run: SegmentRun, job: Pass) -> None:
        """What changes from step to step, for every env."""
        weights: list[float] = []
        if job.inputs is not None:
            weights = [job.weights[fed] if fed is not None else per_row / self._deploy.batch for _, fed, per_row in run.program.weighted]
        scalars = self._backend.set_scalars([self._step, *run.weights[: len(weights)]], [job.step, *weights])
        for envs in run.envs:
            for env in envs:
                env.step = scalars[0]
                env.loss_scale = self._ending.loss_scale
            for (at, _, _), weight in zip(run.program.weighted, scalars[1:], strict=False):  # none, without a forward
                envs[at].weight = weight

    def _issue_recorded(self, run: SegmentRun, job: Pass) -> _Made:
        """The pass as one piece of work: its inputs are copied to where they lay when it was recorded."""
        assert job.inputs is not None
        replay = run.replays.get(job.micro)
        if replay is None:
            earlier = next((known.recording for known in run.replays.values()), None)  # micro-batches run in order
            recording = self._backend.recording(earlier)
            if recording is None:
                return self._issue(run, job)
            inputs = tuple(map(self._on_device, job.inputs))
            replay = run.replays[job.micro] = _Replay(recording, inputs, _Made((), (), ()))
        else:
            for place, given in zip(replay.inputs, job.inputs, strict=True):
                self._backend.copy_into(place, self._on_device(given))

        def work() -> None:
            replay.made = self._issue(run, replace(job, inputs=replay.inputs))

        replay.recording.run(work)
        return replay.made

    def _issue(self, run: SegmentRun, job: Pass) -> _Made:
        """Issue the work of a pass."""
        first, last = micro_rows(self._deploy.batch, self._deploy.micro_batches, job.micro)
        shards = _cut(last - first, self._shards)
        forward, backward = job.inputs is not None, job.gradients is not None
        if forward:
            run.tapes[job.micro] = [run.program.tape() for _ in shards]
        outputs = self._whole(run.program.output_shapes if forward else (), last - first, len(shards))
        gradients = self._whole(run.program.gradient_shapes if backward else (), last - first, len(shards))
        tasks = [
            partial(self._shard, run, job, _Piece(shard, first + rows.start, rows, run.tapes[job.micro][shard]), (outputs, gradients))
            for shard, rows in enumerate(shards)
        ]
        parts = self._crew.run(tasks)
        if backward or not run.program.routes.backward:
            del run.tapes[job.micro]
        losses = [_sum([part[at] for part in parts]) for at in range(len(run.program.routes.costs))] if forward else []
        return _Made(outputs, losses, gradients)

    def _shard(self, run: SegmentRun, job: Pass, piece: _Piece, whole: tuple[list[Array], list[Array]]) -> list[Scalar]:
        """One shard's part of a pass; what leaves the segment goes into its rows of `whole`. Returns the losses."""
        program, envs, losses = run.program, run.envs[piece.shard], list[Scalar]()
        for env in envs:
            env.first_row = piece.first_row
            env.accumulate = piece.shard < run.written_forward
        if job.inputs is not None:
            outputs, losses = program.forward(envs, self._cut_rows(job.inputs, program.routes.inputs, piece.rows), piece.tape)
            self._place(whole[0], outputs, piece.rows)
        if job.gradients is not None:
            for env in envs:
                env.accumulate = piece.shard < run.written_backward
            incoming = self._cut_rows(job.gradients, program.routes.incoming, piece.rows)
            self._place(whole[1], program.backward(envs, incoming, piece.tape), piece.rows)
        return losses

    def _cut_rows(self, tensors: Sequence[Array], entries: Sequence[ExternalInput | IncomingGradient], rows: slice) -> list[Array]:
        pairs = zip(tensors, entries, strict=True)
        return [self._on_device(tensor[rows]) if entry.from_host else tensor[rows] for tensor, entry in pairs]

    def _on_device(self, tensor: Array) -> Array:
        return self._backend.from_host(tensor) if isinstance(tensor, np.ndarray) else tensor

    def _whole(self, kinds: Sequence[tuple[Shape, Precision]], rows: int, shards: int) -> list[Array]:
        """Room for tensors of all rows; with one shard its own arrays serve, so there is only a place for them."""
        return [self._backend.empty((rows, *shape), precision) if shards > 1 else None for shape, precision in kinds]

    def _place(self, whole: list[Array], parts: Sequence[Array], rows: slice) -> None:
        for at, part in enumerate(parts):
            if whole[at] is None:
                whole[at] = part
            else:
                self._backend.copy_into(whole[at][rows], part)

    def _handed(self, routes: SegmentRoutes, made: _Made, losses: Sequence[tuple[NodeId, Scalar]]) -> Later[Results]:
        """What leaves the segment; what travels through host memory is brought there. Losses of steps decided here wait for the end."""
        travels = [any(map(self._is_far, output.remote)) for output in routes.outputs[: len(made.outputs)]]
        travels += [self._is_far(entry.to) for entry in routes.outgoing[: len(made.gradients)]]
        tensors = [*made.outputs, *made.gradients]
        wanted = [tensor for tensor, leaves in zip(tensors, travels, strict=True) if leaves]
        hosts, values = self._hosts(wanted), self._hosts([loss for _, loss in losses])

        def later() -> Results:
            there = iter(hosts())
            handed = tuple(Handoff(tensor, next(there) if leaves else None) for tensor, leaves in zip(tensors, travels, strict=True))
            said = tuple((cost, float(value)) for (cost, _), value in zip(losses, values(), strict=True))
            return Results(handed[: len(made.outputs)], said, handed[len(made.outputs) :])

        return later

    def _is_far(self, to: Local | Remote) -> bool:
        return isinstance(to, Remote) and to.pnode not in self._plan.near

    def _hosts(self, arrays: Sequence[Array | Scalar]) -> Later[Sequence[HostArray]]:
        """Their values on the host. Nobody writes to activations again, so where they are there already they need not be copied."""
        if self._backend.runs_shards or not arrays:
            return lambda: arrays
        return self._backend.fetch(arrays).wait

    # -- a validation --------------------------------------------------------------------------------------------------

    def evaluate(self, job: Evaluate) -> Later[Results]:
        """A micro-batch goes forward through a segment, and leaves nothing behind."""
        run, rows = self._segments[job.segment], job.inputs[0].shape[0]
        if not run.evaluating:
            run.evaluating = [[self._evaluating(env) for env in envs] for envs in run.envs]
        self._set_weights(run, job, rows)
        parts = _cut(rows, self._shards)
        outputs = self._whole(run.program.output_shapes, rows, len(parts))
        losses = self._crew.run([partial(self._evaluate, run, job, at, (part, outputs)) for at, part in enumerate(parts)])
        sums = [_sum([one[at] for one in losses]) for at in range(len(run.program.routes.costs))]
        return self._handed(run.program.routes, _Made(outputs, sums, ()), list(zip(run.program.routes.costs, sums, strict=True)))

    def _evaluating(self, env: Env) -> Env:
        return replace(env, training=False, grads={}, loss_scale=self._backend.scalar(1.0), weight=self._backend.scalar(0.0))

    def _set_weights(self, run: SegmentRun, job: Evaluate, rows: int) -> None:
        """Of its costs: each is the mean over the micro-batch."""
        weighted = run.program.weighted
        weights = [job.weights[fed] if fed is not None else per_row / rows for _, fed, per_row in weighted]
        for envs in run.evaluating:
            scalars = self._backend.set_scalars([envs[at].weight for at, _, _ in weighted], weights)
            for (at, _, _), weight in zip(weighted, scalars, strict=True):
                envs[at].weight = weight

    def _evaluate(self, run: SegmentRun, job: Evaluate, shard: int, into: tuple[slice, list[Array]]) -> list[Scalar]:
        rows, whole = into
        inputs = self._cut_rows(job.inputs, run.program.routes.inputs, rows)
        outputs, losses = run.program.evaluate(run.evaluating[shard], inputs)
        self._place(whole, outputs, rows)
        return losses

    # -- the end of a step --------------------------------------------------------------------------------------------

    def fold(self) -> Later[tuple[dict[NodeId, float], bool]]:
        """(sum of squares per node that owns parameters, all finite) of the step's gradients."""
        return self._ending.fold(self._written())

    def abort(self) -> None:
        """Forget what was done of the step under way; it begins again with its first micro-batch.

        Gradients need not be cleared, and recorded passes stay as they are: the first shard to write does not add.
        """
        self._losses = {}
        for run in self._segments.values():
            run.tapes.clear()
            run.written_forward = run.written_backward = 0

    def apply(self, skip: bool, numbers: StepNumbers, next_loss_scale: float) -> None:
        """Update every parameter, or none."""
        self._ending.apply(skip, numbers, next_loss_scale)

    def settle(self, step: int) -> Later[tuple[Settlement, Losses]]:
        """Fold, decide and apply, where the whole network is here, and the losses of the step."""
        losses, self._losses = self._losses, {}
        values = self._hosts(list(losses.values()))
        settled = self._ending.settle(step, self._written())

        def later() -> tuple[Settlement, Losses]:
            said = zip(losses, values(), strict=True)
            return settled(), tuple((cost, micro, float(value)) for (cost, micro), value in said)

        return later

    def snapshot(self) -> Later[tuple[dict[str, HostArray], ScalerState]]:
        """Copies of the canonical tensors, and the state that belongs to them."""
        tensors = self._weights.snapshot()
        return lambda: (tensors(), self.state)

    def _written(self) -> dict[NodeId, int]:
        """By node: the row shards that have gradients. A new step begins."""
        written = {
            node: max(run.written_forward, run.written_backward) for run in self._segments.values() for node in run.program.routes.backward
        }
        for run in self._segments.values():
            run.written_forward = run.written_backward = 0
        return written


def _sum(losses: Sequence[Scalar]) -> Scalar:
    """Of shards, in order. A device has one shard, whose loss is no Python number."""
    return losses[0] if len(losses) == 1 else in_order(losses)


def _cut(rows: int, shards: int) -> list[slice]:
    """`rows` in min(shards, rows) consecutive pieces."""
    count = min(shards, rows)
    return [slice(at * rows // count, (at + 1) * rows // count) for at in range(count)]
