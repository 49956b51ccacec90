"""One session's arithmetic: runs the programs of its segments over row shards, and ends steps.

Rule 1: on backends that run shards, the rows of a micro-batch are cut into S = min(shards, rows) pieces, whatever the machine; each piece
goes through a whole segment on one thread. Threads only decide how many run at once.
Rule 2: losses and gradients of shards are added in shard order.
Rule 3: nothing here knows other sessions, the bus or the loop; everything runs in the order in which it is called.

R rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from dcnr.agents.commands import Pass
from dcnr.agents.crew import Crew
from dcnr.agents.events import Handoff
from dcnr.agents.plan import Plan, micro_rows
from dcnr.agents.program import Program, Tape
from dcnr.agents.routing import ExternalInput, IncomingGradient, Remote
from dcnr.agents.weights import Weights, squared_norms
from dcnr.backends.base import Array, Backend, HostArray, Precision
from dcnr.bus.messages import Deploy
from dcnr.ids import NodeId
from dcnr.nodes.base import Env, Shape
from dcnr.optim.decide import ScalerState, Verdict, decide
from dcnr.optim.hyper import Hyper
from dcnr.optim.update import StepNumbers

T = TypeVar("T")


class SegmentRun:
    """One segment's program, its envs by shard, and the tapes of the micro-batches in flight."""

    def __init__(self, program: Program, envs: Sequence[list[Env]]) -> None:
        self.program = program
        self.envs = envs
        self.tapes: dict[int, list[Tape]] = {}
        """By micro-batch, then by shard."""
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
        self.state = _scaler(deploy.state)
        """After the last step that was settled here; of a session decided elsewhere, only `loss_scale` is kept up."""

    def load(self, saved: Mapping[str, HostArray] | None) -> None:
        """Make the arrays and compile the segments."""
        self._weights.load(self._hyper, self._deploy.seed, saved)
        for routes in self._plan.routes.segments:
            program = Program(self._plan.graph, routes, self._plan.nodes)
            envs = [[self._env(node, shard) for node in routes.nodes] for shard in range(self._shards)]
            self._segments[routes.index] = SegmentRun(program, envs)

    def _env(self, node: NodeId, shard: int) -> Env:
        return Env(
            backend=self._backend,
            params=self._weights.params[node],
            grads={name: array[shard] for name, array in self._weights.gradients[node].items()},
            accumulate=False,
            activation=self._plan.graph.by_id[node].activation_precision,
            seed=self._deploy.seed,
            step=0,
            first_row=0,
            training=True,
            weight=0.0,
            loss_scale=1.0,
        )

    # -- a micro-batch ------------------------------------------------------------------------------------------------

    def run(self, job: Pass) -> tuple[tuple[Handoff, ...], tuple[tuple[NodeId, float], ...], tuple[Handoff, ...]]:
        """(external outputs, losses, outgoing gradients) of a micro-batch, as far as `job` asks for them."""
        run = self._segments[job.segment]
        routes = run.program.routes
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
        run.written_forward = max(run.written_forward, len(shards) * forward)
        run.written_backward = max(run.written_backward, len(shards) * backward)
        if backward or not routes.backward:
            del run.tapes[job.micro]
        losses = tuple((cost, sum(part[at] for part in parts)) for at, cost in enumerate(routes.costs)) if forward else ()
        return (
            self._handed(outputs, [bool(output.remote) for output in routes.outputs]),
            losses,
            self._handed(gradients, [isinstance(entry.to, Remote) for entry in routes.outgoing]),
        )

    def _shard(self, run: SegmentRun, job: Pass, piece: _Piece, whole: tuple[list[Array], list[Array]]) -> list[float]:
        """One shard's part of a pass; what leaves the segment goes into its rows of `whole`. Returns the losses."""
        program, envs, losses = run.program, run.envs[piece.shard], list[float]()
        for env in envs:
            env.step = job.step
            env.first_row = piece.first_row
            env.loss_scale = self.state.loss_scale
            env.accumulate = piece.shard < run.written_forward
        if job.inputs is not None:
            for at, fed, per_row in program.weighted:
                envs[at].weight = job.weights[fed] if fed is not None else per_row / self._deploy.batch
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
        return [self._backend.from_host(tensor[rows]) if entry.from_host else tensor[rows] for tensor, entry in pairs]

    def _whole(self, kinds: Sequence[tuple[Shape, Precision]], rows: int, shards: int) -> list[Array]:
        """Room for tensors of all rows; with one shard its own arrays serve, so there is only a place for them."""
        return [self._backend.empty((rows, *shape), precision) if shards > 1 else None for shape, precision in kinds]

    def _place(self, whole: list[Array], parts: Sequence[Array], rows: slice) -> None:
        for at, part in enumerate(parts):
            if whole[at] is None:
                whole[at] = part
            else:
                self._backend.copy_into(whole[at][rows], part)

    def _handed(self, arrays: Sequence[Array], remote: Sequence[bool]) -> tuple[Handoff, ...]:
        pairs = zip(arrays, remote, strict=False)  # no arrays, where that phase did not run
        return tuple(Handoff(array, self._backend.to_host(array) if travels else None) for array, travels in pairs)

    # -- the end of a step --------------------------------------------------------------------------------------------

    def fold(self) -> tuple[dict[NodeId, float], bool]:
        """(sum of squares per node that owns parameters, all finite) of the step's gradients."""
        written = {
            node: max(run.written_forward, run.written_backward) for run in self._segments.values() for node in run.program.routes.backward
        }
        for run in self._segments.values():
            run.written_forward = run.written_backward = 0
        owned = self._weights.owned
        measured = self._spread([partial(one.fold, self._backend, written.get(one.node.id, 0)) for one in owned])
        return squared_norms(zip(owned, measured, strict=True))

    def apply(self, skip: bool, numbers: StepNumbers, next_loss_scale: float) -> None:
        """Update every parameter, or none."""
        if not skip:
            self._spread([partial(one.update, self._backend, self._hyper, numbers) for one in self._weights.owned])
        self.state = replace(self.state, loss_scale=next_loss_scale)

    def settle(self, step: int) -> Verdict:
        """Fold, decide and apply, where the whole network is here: by the same function, and in the same order, as the trainer."""
        norms, finite = self.fold()
        verdict = decide(self._hyper, self._deploy.total_steps, step, self.state, list(norms.values()), finite)
        numbers = StepNumbers(verdict.state.updates, verdict.lr, verdict.lr_factor, verdict.grad_factor)
        self.apply(verdict.skip, numbers, verdict.state.loss_scale)
        self.state = verdict.state
        return verdict

    def snapshot(self) -> dict[str, HostArray]:
        """Copies of the canonical tensors."""
        return self._weights.tensors()

    def _spread(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Do one task per owned parameter, the largest first, so that no thread ends long after the others."""
        sizes = self._weights.sizes
        order = sorted(range(len(tasks)), key=lambda at: -sizes[at])
        results = dict(zip(order, self._crew.run([tasks[at] for at in order]), strict=True))
        return [results[at] for at in range(len(tasks))]


def _cut(rows: int, shards: int) -> list[slice]:
    """`rows` in min(shards, rows) consecutive pieces."""
    count = min(shards, rows)
    return [slice(at * rows // count, (at + 1) * rows // count) for at in range(count)]


def _scaler(fields: Mapping[str, int | float]) -> ScalerState:
    return ScalerState(int(fields["updates"]), float(fields["loss_scale"]), int(fields["good_steps"]), bool(fields["dynamic"]))
