"""A cluster inside one process: agents on a memory bus, and a trainer that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from pydantic import TypeAdapter

from dcnr.agents.shell import Shell
from dcnr.backends.base import Backend
from dcnr.bus import codec, subjects
from dcnr.bus.base import Bus
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import (
    TRAINER,
    Decision,
    Deploy,
    Deployed,
    Failed,
    Heartbeat,
    Hop,
    Message,
    PNodeInfo,
    Refused,
    Report,
    StepDone,
    StepMessage,
    StepReport,
)
from dcnr.bus.transport import HopTransport
from dcnr.clock import MonotonicClock
from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Graph
from dcnr.optim.decide import ScalerState, Verdict, decide
from dcnr.optim.hyper import Hyper

TRAINER_NAME = PNodeId("trainer")
PATIENCE = 20.0
"""Seconds after which a test gives up."""
GIB = 1 << 30


def info_of(name: str, memory: int = GIB) -> PNodeInfo:
    """An agent of this process."""
    return PNodeInfo(PNodeId(name), "1", "here", "numpy", "test", memory, 0, 2, 1, "0")


@asynccontextmanager
async def agents(
    broker: MemoryBroker, backend: Backend | Callable[[], Backend], infos: Sequence[PNodeInfo], threads: int = 2
) -> AsyncIterator[dict[PNodeId, Shell]]:
    """Run an agent per info, on one backend or each on its own; at the end each says good-bye and is gone."""

    async def connect(_purpose: str) -> Bus:
        return broker.connect()

    backends = [backend() if callable(backend) else backend for _ in infos]
    shells = {info.pnode: Shell(info, own, MonotonicClock(), threads) for info, own in zip(infos, backends, strict=True)}
    ready = [asyncio.Event() for _ in infos]
    async with asyncio.TaskGroup() as group:
        for shell, event in zip(shells.values(), ready, strict=True):
            group.create_task(shell.run(connect, event.set))
        async with asyncio.timeout(PATIENCE):
            for event in ready:
                await event.wait()
        try:
            yield shells
        finally:
            for shell in shells.values():
                shell.machine.validate()
                shell.stop()


@dataclass
class Trainer:
    """What an orchestrator would send, said by hand."""

    bus: Bus
    graph: Graph
    deploy: Deploy
    transport: HopTransport
    heard: list[Message] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    state: ScalerState = field(default_factory=ScalerState)
    verdicts: dict[int, Verdict] = field(default_factory=dict)

    @classmethod
    async def join(cls, broker: MemoryBroker, graph: Graph, deploy: Deploy, infos: Sequence[PNodeInfo]) -> Trainer:
        """Listen to reports and heartbeats."""
        bus = broker.connect()
        transport = HopTransport(bus, TRAINER_NAME, "elsewhere", lambda _hop, _payload: None)
        transport.set_peers(infos)
        scaler = TypeAdapter(ScalerState).validate_python(deploy.state)
        trainer = cls(bus, graph, replace(deploy, peers=tuple(infos)), transport, state=scaler)
        await bus.subscribe(subjects.report(deploy.network), trainer._hear)
        await bus.subscribe(subjects.HEARTBEATS, trainer._hear)
        return trainer

    @property
    def hosts(self) -> list[PNodeId]:
        """Who takes part."""
        return sorted(set(self.deploy.assignment.values()))

    def _hear(self, data: bytes) -> None:
        self.heard.append(codec.decode(data))
        self.changed.set()

    async def tell(self, pnode: PNodeId, message: Message) -> None:
        """Give an order."""
        await self.bus.publish(subjects.command(pnode), codec.encode(message))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until what was heard satisfies `condition`; a failure or refusal is an error."""
        async with asyncio.timeout(PATIENCE):
            while not condition():
                for message in self.heard:
                    if isinstance(message, Failed | Refused):
                        raise AssertionError(message)
                self.changed.clear()
                await self.changed.wait()

    def reports(self, kind: type[Report], step: int | None = None) -> dict[PNodeId, Report]:
        """The reports of one kind (about one step) in this epoch, by PNode."""
        return {
            message.pnode: message
            for message in self.heard
            if isinstance(message, kind) and message.epoch == self.deploy.epoch and step in (None, getattr(message, "step", None))
        }

    async def start(self) -> None:
        """Deploy, and wait until everything is in place."""
        for pnode in self.hosts:
            await self.tell(pnode, self.deploy)
        await self.until(lambda: len(self.reports(Deployed)) == len(self.hosts))

    async def feed(self, step: int, tokens_BS: np.ndarray, attempt: int = 0) -> None:
        """Send the ids and targets of a step."""
        deploy = self.deploy
        weight = 1.0 / tokens_BS[:, 1:].size
        rows = deploy.batch // deploy.micro_batches
        for micro in range(deploy.micro_batches):
            part = tokens_BS[micro * rows : (micro + 1) * rows]
            await self.send(step, micro, 0, part[:, :-1], attempt=attempt)
            await self.send(step, micro, 1, part[:, 1:], weight, attempt)

    async def send(self, step: int, micro: int, what: int, payload_RT: np.ndarray, weight: float = 0.0, attempt: int = 0) -> None:
        """One hop: ids (`what` 0) to the embedder, or targets (1) to the cost."""
        deploy = self.deploy
        target = next(
            (node.id, slot)
            for node in self.graph.nodes
            for slot, port in enumerate(node.inputs)
            if port is None and (node.type == "embedder") == (what == 0)
        )
        hop = Hop(
            deploy.network, deploy.session, deploy.epoch, step, micro, attempt, "fwd", TRAINER, what, (target,), TRAINER_NAME,
            "int64", payload_RT.shape, weight,
        )  # fmt: skip
        await self.transport.send(deploy.assignment[target[0]], hop, np.ascontiguousarray(payload_RT))

    async def step(self, step: int, tokens_BS: np.ndarray) -> float:
        """Train one step; returns its loss."""
        await self.feed(step, tokens_BS)
        if self.deploy.decides:
            await self.until(lambda: bool(self.reports(StepDone, step)))
            done = next(iter(self.reports(StepDone, step).values()))
            assert isinstance(done, StepDone)
            return done.loss
        await self.until(lambda: len(self.reports(StepReport, step)) == len(self.hosts))
        return await self.decide(step)

    async def decide(self, step: int) -> float:
        """End a step that all have reported."""
        reports = [report for report in self.reports(StepReport, step).values() if isinstance(report, StepReport)]
        norms = {node: squares for report in reports for node, squares in report.squared_norms.items()}
        verdict = decide(
            self.hyper, self.deploy.total_steps, step, self.state,
            [norms[node.id] for node in self.graph.nodes if node.id in norms], all(report.finite for report in reports),
        )  # fmt: skip
        losses: Mapping[tuple[NodeId, int], float] = {(cost, micro): loss for report in reports for cost, micro, loss in report.losses}
        loss = sum(losses[key] for key in sorted(losses))
        decision = Decision(
            self.deploy.session, self.deploy.epoch, step, verdict.skip, verdict.lr, verdict.lr_factor, verdict.grad_factor, loss,
            verdict.grad_norm, self.state.loss_scale, asdict(verdict.state), self.hyper.saves(step, 0.0),
        )  # fmt: skip
        self.state, self.verdicts[step] = verdict.state, verdict
        await self.announce(decision)
        return loss

    async def announce(self, message: StepMessage) -> None:
        """Tell everyone who takes part."""
        await self.bus.publish(subjects.step(self.deploy.network), codec.encode(message))

    @property
    def hyper(self) -> Hyper:
        """What the deploy says."""
        return Hyper.model_validate(self.deploy.hyper)

    def beats(self) -> list[Heartbeat]:
        """All heartbeats so far."""
        return [message for message in self.heard if isinstance(message, Heartbeat)]

    async def leave(self) -> None:
        """Disconnect."""
        await self.transport.close()
        await self.bus.close()


def batches(vocabulary: int, seq: int, batch: int, steps: int) -> list[np.ndarray]:
    """Ids [B, T + 1] of each step, the same for every run: two batches in turn, so that there is something to learn."""
    draw = np.random.default_rng(3)
    pair = [draw.integers(0, vocabulary, (batch, seq + 1)) for _ in range(2)]
    return [pair[step % 2] for step in range(steps)]
