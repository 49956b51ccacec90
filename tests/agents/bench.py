"""A session that is deployed, and the tensors, jobs and answers that tests give it."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np

from dcnr.agents.commands import Abort, Command, Job, Pass, SendReport
from dcnr.agents.events import Folded, Handoff, PassDone
from dcnr.agents.hosted import HostedSession
from dcnr.agents.plan import make_plan
from dcnr.agents.telemetry import Telemetry
from dcnr.bus.messages import (
    TRAINER,
    Decision,
    Deploy,
    Hop,
    SavedPart,
)
from dcnr.bus.subjects import Phase
from dcnr.ids import NodeId, PNodeId
from dcnr.optim.decide import ScalerState, Verdict
from tests.agents.tiny import DIM, NETWORK, SEQ, SESSION, A, B, graph_of

GRAPH = graph_of()
ROWS = 3
SCALER = ScalerState(updates=1)
VERDICT = Verdict(False, 0.1, 1.0, 1.0, 2.5, SCALER)
PART = SavedPart("key", "00", 3, ("up.weight",))


def only_on_b(*nodes: str) -> dict[NodeId, PNodeId]:
    """Those on `b`, the rest on `a`."""
    return {node.id: B if node.id in nodes else A for node in GRAPH.nodes}


class Bench:
    """A session that is installed, and what it said."""

    def __init__(self, deploy: Deploy, me: PNodeId) -> None:
        self.telemetry = Telemetry()
        self.me = me
        self.session = HostedSession(me, deploy, self.telemetry)
        self.session.prepared(make_plan(deploy, me))
        self.first = self.session.installed(None, 0.0)

    @property
    def jobs(self) -> list[Job]:
        """All that can be done now."""
        return self.at(0.0)

    def at(self, now: float) -> list[Job]:
        """All that can be done at a certain time."""
        return list(iter(lambda: self.session.next_job(now), None))

    def hop(
        self, phase: Phase, source: tuple[str, int], targets: tuple[tuple[str, int], ...], at: tuple[int, int], rows: int = ROWS,
        **other: object,
    ) -> list[Command]:  # fmt: skip
        """A tensor of so many rows arrives: ids, or numbers [rows, SEQ, DIM]."""
        fed = source[0] == TRAINER
        payload = np.zeros((rows, SEQ), np.int64) if fed else np.zeros((rows, SEQ, DIM), np.float32)
        deploy = self.session.deploy
        hop = Hop(
            NETWORK, SESSION, deploy.epoch, at[0], at[1], 0, phase, NodeId(source[0]), source[1],
            tuple((NodeId(node), slot) for node, slot in targets), PNodeId("x"), payload.dtype.name, payload.shape,
        )  # fmt: skip
        return self.session.hop(replace(hop, **other), payload)  # type: ignore[arg-type]  # fields of Hop

    def feed(self, step: int, micro: int) -> list[Command]:
        """Ids and targets of a micro-batch."""
        ids = self.hop("fwd", (TRAINER, 0), (("embedder", 0),), (step, micro))
        return ids + self.hop("fwd", (TRAINER, 1), (("loss", 1),), (step, micro), weight=0.25)

    def passed(self, job: Pass, outputs: int = 0, gradients: int = 0, loss: float | None = None) -> list[Command]:
        """The compute thread did a pass."""
        tensor = np.zeros((ROWS, SEQ, DIM), np.float32)
        done = PassDone(
            SESSION, self.session.deploy.epoch, job.segment, job.step, job.micro, job.attempt, (Handoff(tensor, tensor),) * outputs,
            () if loss is None else ((NodeId("loss"), loss),), (Handoff(tensor, tensor),) * gradients,
        )  # fmt: skip
        return self.session.passed(done)

    def folded(self, step: int, now: float = 0.0, attempt: int = 0) -> list[Command]:
        """The gradients of a step are measured."""
        return self.session.folded(Folded(SESSION, self.session.deploy.epoch, step, attempt, {NodeId("up"): 2.0}, True), now)

    def decision(self, step: int, save: bool = False) -> Decision:
        """Apply."""
        return Decision(
            SESSION, self.session.deploy.epoch, step, False, 0.1, 1.0, 1.0, 2.5, 0.5, 1.0, asdict(ScalerState(updates=step)), save
        )

    def decide(self, step: int, save: bool = False) -> list[Command]:
        """The decision came."""
        return self.session.decision(self.decision(step, save), 0.0)

    def answered(self, jobs: int) -> None:
        """The compute thread did so many."""
        for _ in range(jobs):
            self.session.answered()


def messages(commands: list[Command]) -> list[object]:
    """What is reported, in order."""
    return [command.report for command in commands if isinstance(command, SendReport)]


def through(bench: Bench, step: int, attempt: int = 0) -> list[Command]:
    """Both micro-batches of a step go forward and back through `b`."""
    commands = []
    for micro in (0, 1):
        bench.hop("fwd", ("residual", 0), (("up", 0),), (step, micro), attempt=attempt)
        *before, forward = bench.jobs
        assert [type(job) for job in before] == ([Abort] if attempt and not micro else [])
        assert isinstance(forward, Pass)
        assert (forward.gradients, forward.attempt) == (None, attempt)
        commands += bench.passed(forward, outputs=1)
        wide = np.zeros((ROWS, SEQ, 2 * DIM), np.float32)
        hop = Hop(
            NETWORK, SESSION, bench.session.deploy.epoch, step, micro, attempt, "bwd", NodeId("down"), 0, ((NodeId("gelu"), 0),),
            A, "float32", wide.shape,
        )  # fmt: skip
        bench.session.hop(hop, wide)
        backward = bench.session.next_job(0.0)
        assert isinstance(backward, Pass)
        assert backward.inputs is None
        commands += bench.passed(backward, gradients=1)
    return commands
