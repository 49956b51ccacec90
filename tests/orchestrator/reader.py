"""A checkpoint that is read without PNodes: a language of one rule, and a stage that answers what a reading asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dcnr.bus.messages import Deploy, Deployed, Failed, Hop, Hosted, PNodeInfo, Refused, Undeploy
from dcnr.ids import NEVER, NodeId, PNodeId, SessionId
from dcnr.network.load import load_graph
from dcnr.orchestrator.commands import Command, Publish, SendHop, Spoke
from dcnr.orchestrator.events import Generate, LogitsRead, Offered, Standing
from dcnr.orchestrator.reading import Reading, Request
from dcnr.orchestrator.sampling import Sampling
from dcnr.orchestrator.session import Settings
from dcnr.orchestrator.source import Source
from dcnr.passes import prepare
from tests.agents.tiny import SEQ, TINY, VOCABULARY
from tests.orchestrator.fakes import info

SETTINGS = Settings(PNodeId("orchestrator-1"), "file:///data")
COLD = Sampling(0.0, 0, 1.0, 0, VOCABULARY)


def source(pnodes: int = 0, step: int = 3, weights: str = "sha256", fuse: bool = True) -> Source:
    """Of session `s`."""
    graph = prepare(load_graph(TINY, "tiny.yml"), fuse, "generate")
    return Source(SessionId("s"), step, f"checkpoints/s/{step:010d}/manifest.json", weights, TINY, fuse, graph, pnodes)


def following(window: Sequence[int]) -> int:
    """What comes after a window, in the language of these tests."""
    return (7 * sum(window) + 3 * len(window) + window[0]) % VOCABULARY


def text_of(prompt: Sequence[int], count: int) -> list[int]:
    """What follows a prompt."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(following(ids[-SEQ:]))
    return ids[len(prompt) :]


def ask(name: str = "r", prompt: Sequence[int] = (1, 2), limit: int = 8, **other: object) -> Generate:
    """A request; `other` are further fields."""
    return replace(Generate(1, name, source(), tuple(prompt), COLD, limit, True, lambda _ids: False, lambda _ids, _done: ""), **other)  # type: ignore[arg-type]


class Stage:
    """One reading, and PNodes that do what it says. `lose`: hops that do not arrive."""

    def __init__(self, *pnodes: str, reads: Source | None = None) -> None:
        self.now = 0.0
        self.source = reads or source()
        self.reading = Reading(self.source, SETTINGS, NEVER, self.now)
        self.infos: tuple[PNodeInfo, ...] = tuple(info(name) for name in pnodes)
        self.lose: Callable[[Hop], bool] = lambda _hop: False
        self.deploys: list[Deploy] = []
        self.undeploys: list[tuple[str, Undeploy]] = []
        self.hops: list[tuple[Hop, list[int]]] = []
        self.news: list[str] = []
        self._kept: dict[tuple[int, int], list[int]] = {}

    def request(self, name: str = "r") -> Request:
        """Where it stands."""
        return self.reading.requests[name]

    def give(self, *events: object) -> list[Command]:
        """To the machine; what it says is not done."""
        said: list[Command] = []
        for event in events:
            said += self.reading.handle(event, self.now)  # type: ignore[arg-type]
            self.reading.validate()
        return said

    def play(self, *events: object) -> None:
        """To the machine, and all that follows from it."""
        commands = self.give(*events)
        while commands:
            match commands.pop(0):
                case Publish(subject, Deploy() as deploy):
                    self.deploys.append(deploy)
                    pnode = PNodeId(subject.split(".")[2])
                    commands += self.give(Deployed(pnode, deploy.session, deploy.epoch, deploy.step, 100))
                case Publish(subject, Undeploy() as undeploy):
                    self.undeploys.append((subject.split(".")[2], undeploy))
                case SendHop(_, hop, payload):
                    commands += self.answer(hop, [int(token) for token in payload[0]])
                case Spoke(name):
                    self.news.append(name)
                case command:
                    raise AssertionError(command)

    def answer(self, hop: Hop, ids: list[int]) -> list[Command]:
        """The logits that follow a piece."""
        self.hops.append((hop, ids))
        if self.lose(hop):
            return []
        key = hop.micro, hop.attempt
        if hop.step:
            assert len(self._kept[key]) == hop.step, "a piece that does not begin where its attempt was read to"
        window = [*(self._kept.get(key, []) if hop.step else []), *ids]
        if hop.caches:
            self._kept[key] = window
        assert len(window) <= SEQ
        return self.give(self.logits(hop, following(window)))

    def logits(self, hop: Hop, token: int) -> LogitsRead:
        """That say `token`."""
        values = np.zeros((1, VOCABULARY), np.float32)
        values[0, token] = 1.0
        return LogitsRead(replace(hop, source=NodeId("lm_head"), dtype="float32", shape=values.shape), values)

    def offered(self) -> Offered:
        """The fleet."""
        return Offered(self.infos)

    def stand(self, pnode: str, work: int, busy: bool = False) -> None:
        """A heartbeat of a host."""
        deploy = self.deploys[-1]
        hosted = Hosted(deploy.session, deploy.epoch, deploy.step, 3, 100, work=work, busy=busy)
        self.play(Standing(info(pnode), hosted))

    def failed(self, pnode: str, world: bool) -> Failed:
        """Something broke there."""
        return Failed(PNodeId(pnode), self.source.name, self.reading.newest_epoch, "node 'up': it broke", "", world)

    def refused(self, pnode: str, damaged: bool) -> Refused:
        """A deploy was refused."""
        return Refused(PNodeId(pnode), self.source.name, self.reading.newest_epoch, "no", damaged)
