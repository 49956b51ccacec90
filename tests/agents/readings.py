"""A network that generates: its deploy, weights, and PNodes that pass pieces to each other by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from dcnr.agents.commands import Command, Read, SendHop
from dcnr.agents.events import ReadDone
from dcnr.agents.forward import Forward
from dcnr.agents.plan import make_plan
from dcnr.agents.reading import HostedReading
from dcnr.agents.telemetry import Telemetry
from dcnr.backends.base import Backend, HostArray
from dcnr.bus.messages import TRAINER, Deploy, Hop
from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Graph
from dcnr.network.instantiate import instantiate
from dcnr.network.load import load_graph
from dcnr.nodes.initial import initial_value
from dcnr.passes import prepare
from tests.agents.tiny import TINY, deploy_of

READER = PNodeId("orchestrator")
SLOTS = 2
WINDOW = 5


def graph_to_generate(text: str = TINY, fuse: bool = False) -> Graph:
    """The prepared graph."""
    return prepare(load_graph(text, "tiny.yml"), fuse, "generate")


def deploy_to_generate(homes: Mapping[NodeId, PNodeId], text: str = TINY, fuse: bool = False) -> Deploy:
    """A deploy that generates."""
    deploy = deploy_of(homes, text=text, fuse=fuse, batch=SLOTS, micro_batches=1, hyper={"lr": 0.01})
    return replace(deploy, purpose="generate", reader=READER, decides=False, checkpoint="key", hyper={})


def weights(text: str = TINY) -> dict[str, HostArray]:
    """Canonical tensors that differ enough to tell ids apart."""
    graph = prepare(load_graph(text, "tiny.yml"), False)
    parts = [parameter for node in graph.nodes for parameter in instantiate(node).parameters]
    return {
        f"{part.node}.{part.name}": 8 * initial_value(3, parameter)[part.start : part.stop]
        for parameter in parts
        for part in parameter.parts
    }


class Relay:
    """All PNodes of a deploy, each with its machine and its arithmetic. `sent` are the hops between them, as they were sent."""

    def __init__(self, deploy: Deploy, backend: Backend, text: str = TINY) -> None:
        self.deploy = deploy
        self.machines: dict[PNodeId, HostedReading] = {}
        self.forwards: dict[PNodeId, Forward] = {}
        self.sent: list[Hop] = []
        self.read: list[Read] = []
        self.logits: list[tuple[Hop, HostArray]] = []
        for pnode in sorted(set(deploy.assignment.values())):
            plan = make_plan(deploy, pnode)
            self.machines[pnode] = HostedReading(pnode, deploy, Telemetry())
            self.machines[pnode].prepared(plan)
            self.machines[pnode].installed()
            self.forwards[pnode] = Forward(backend, plan)
            self.forwards[pnode].load(weights(text))

    def feed(self, ids: list[int], position: int, attempt: int = 0, caches: bool = True, slot: int = 0) -> HostArray:
        """The logits that follow a piece."""
        payload = np.array([ids], np.int64)
        hop = Hop(
            self.deploy.network, self.deploy.session, self.deploy.epoch, position, slot, attempt, "fwd", TRAINER, 0,
            ((NodeId("embedder"), 0),), READER, "int64", payload.shape, caches=caches,
        )  # fmt: skip
        self.pass_on(deque([SendHop(self.deploy.assignment["embedder"], hop, payload)]))
        return self.logits[-1][1]

    def pass_on(self, commands: deque[Command]) -> None:
        """Until nobody has anything to do."""
        while commands:
            command = commands.popleft()
            assert isinstance(command, SendHop)
            if command.to == READER:
                assert command.payload.shape[:2] == (1, 1)
                self.logits.append((command.hop, np.array(command.payload)[0, -1]))
                continue
            self.sent.append(command.hop)
            machine = self.machines[command.to]
            commands += machine.hop(command.hop, command.payload)
            while (job := machine.next_job(0.0)) is not None:
                assert isinstance(job, Read)
                self.read.append(job)
                outputs = self.forwards[command.to].read(job)()
                machine.answered()
                of = (job.session, job.epoch, job.segment, job.slot, job.attempt, job.position, job.caches)
                commands += machine.done(ReadDone(*of, outputs))
            machine.validate()
