"""A small network, PNodes as data, and PNodes that speak the protocol of `bus/messages` without computing.

`tests/integration/test_training.py` runs the same orchestrator against the real agents, so these cannot drift from them unnoticed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cache

import numpy as np

from dcnr.bus.messages import (
    CommandMessage,
    Decision,
    Deploy,
    Deployed,
    EvalLoss,
    Hop,
    Hosted,
    Loss,
    PNodeInfo,
    Refused,
    Report,
    Save,
    Saved,
    SavedPart,
    SaveFailed,
    StepDone,
    StepMessage,
    StepReport,
    Undeploy,
)
from dcnr.ids import Epoch, NetworkId, NodeId, PNodeId, SessionId
from dcnr.network.graph import Graph
from dcnr.optim.decide import ScalerState, decide
from dcnr.optim.hyper import Hyper
from dcnr.orchestrator.planning import prepared
from dcnr.orchestrator.state import SessionRecord

NETWORK = """
name: small
nodes:
  - {id: embed, type: embedder, config: {vocab_size: "11", dim: "8", seq_len: "4"}}
  - {id: up, type: linear, config: {in_dim: "8", out_dim: "8"}}
  - {id: act, type: relu, config: {}}
  - {id: head, type: linear, config: {in_dim: "8", out_dim: "11"}}
  - {id: loss, type: cost, config: {cost_function: ce_logits, vocab_size: "11"}}
edges:
  - {from: embed, to: up}
  - {from: up, to: act}
  - {from: act, to: head}
  - {from: head, to: loss}
outputs: [{name: logits, node_id: head}]
costs: [{name: loss, node_id: loss}]
"""
SESSION = SessionId("s")
BEST = 4
"""The step after which validations are best."""


@cache
def graph() -> Graph:
    """The small network, prepared."""
    return prepared(NETWORK, "small.yml", fuse=True)


def info(name: str, incarnation: str = "1", memory: int = 1 << 30) -> PNodeInfo:
    """A PNode with one core."""
    return PNodeInfo(PNodeId(name), incarnation, "host", "numpy", "cpu", memory, 0, 1, 1, "0")


def record(steps: int = 4, micro_batches: int = 2, pnodes: int = 0, **hyper: str | int | float | bool | None) -> SessionRecord:
    """A session `s` of the small network: batch 4, seed 7."""
    name, network = SESSION, NetworkId("small")
    return SessionRecord(name, network, NETWORK, "small.yml", "text", steps, 4, micro_batches, 7, dict(hyper), True, pnodes)


def part(pnode: PNodeId, session: SessionId, step: int) -> SavedPart:
    """A part that nobody wrote."""
    return SavedPart(f"checkpoints/{session}/{step}/{pnode}", "0" * 64, 10, (f"{pnode}.weight",))


def micro_loss(hop: Hop, payload_RT: np.ndarray) -> float:
    """Something that depends on every target, the step and the weight."""
    return float(payload_RT.sum()) * hop.weight / hop.step


def eval_loss(hop: Hop, payload_RT: np.ndarray) -> float:
    """Something that depends on every target that counts, the step and the weight; smallest after step `BEST`."""
    return float(payload_RT[payload_RT >= 0].sum()) * hop.weight * (1 + abs(hop.step - BEST))


@dataclass
class Part:
    """One PNode's part of a deployment."""

    done: int
    scaler: ScalerState
    last: Decision | None = None
    work: int = 0
    saved: dict[int, Saved] = field(default_factory=dict)


@dataclass
class Hosting:
    """A deployment on the fake PNodes. A step is computed when all of an attempt was fed; then every PNode has its report."""

    deploy: Deploy
    parts: dict[PNodeId, Part] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    waiting: list[tuple[PNodeId, Hop, np.ndarray]] = field(default_factory=list)
    fed: set[tuple[int, int, int]] = field(default_factory=set)
    losses: dict[int, dict[tuple[NodeId, int], float]] = field(default_factory=dict)
    reports: dict[int, dict[PNodeId, StepReport]] = field(default_factory=dict)
    finished: dict[int, StepDone] = field(default_factory=dict)

    @property
    def key(self) -> tuple[SessionId, Epoch]:
        return self.deploy.session, self.deploy.epoch

    @property
    def whole(self) -> bool:
        """Everyone who takes part is there."""
        return self.parts.keys() == set(self.deploy.assignment.values())


Told = CommandMessage | StepMessage


class FakePNodes:
    """All PNodes at once: what one of them is told, and what they say to it.

    `overflow` names steps that are not finite, `damaged` checkpoints that cannot be read, `unsaved` steps whose state storage refuses;
    those that are `stuck` compute nothing.
    """

    def __init__(self, overflow: frozenset[int] = frozenset()) -> None:
        self.overflow = overflow
        self.damaged: set[str] = set()
        self.unsaved: set[int] = set()
        self.stuck: set[PNodeId] = set()
        self.hosted: dict[tuple[SessionId, Epoch], Hosting] = {}
        self.hops: list[Hop] = []
        self.decided: dict[int, tuple[float, bool]] = {}
        """Loss and skip of every step that was done here."""
        self.times: Counter[tuple[PNodeId, int]] = Counter()
        """How often a PNode did a step."""

    def hosted_by(self, pnode: PNodeId) -> tuple[Hosted, ...]:
        """For its heartbeat."""
        found = []
        for (session, epoch), hosting in self.hosted.items():
            part = hosting.parts.get(pnode)
            if part is not None:
                attempt = max(hosting.attempts.values(), default=0)
                busy = pnode in self.stuck and bool(hosting.waiting or hosting.fed)
                found.append(Hosted(session, epoch, part.done, 1, 100, attempt, part.work, busy, part.last))
        return tuple(found)

    def repeats(self, pnode: PNodeId) -> list[Report]:
        """What it says again because nothing has come of it."""
        said: list[Report] = []
        for hosting in self.hosted.values():
            part = hosting.parts.get(pnode)
            if part is None:
                continue
            report = hosting.reports.get(part.done + 1, {}).get(pnode)
            done = hosting.finished.get(part.done)
            said += [report] if report else []
            said += [done] if done else []
        return said

    def dies(self, pnode: PNodeId) -> None:
        """Its process is gone."""
        for hosting in self.hosted.values():
            hosting.parts.pop(pnode, None)
        self.stuck.discard(pnode)

    def told(self, pnode: PNodeId, message: Told) -> list[Report]:
        """A control message for `pnode`."""
        key = (message.session, message.epoch)
        hosting, part = self.hosted.get(key), self._part(key, pnode)
        match message:
            case Deploy():
                return self._deploy(pnode, message)
            case Undeploy():
                self._undeploy(pnode, message)
            case Save(step=step) if hosting and part:
                if step not in part.saved and step == part.done:
                    return [self._save(hosting, pnode, step)]
                return [part.saved[step]] if step in part.saved else []
            case Decision() if hosting and part:
                return self._decided(hosting, pnode, part, message)
        return []

    def fed(self, to: PNodeId, hop: Hop, payload_RT: np.ndarray) -> list[Report]:
        """A hop of the trainer for `to`."""
        hosting = self.hosted.get((hop.session, hop.epoch))
        part = self._part((hop.session, hop.epoch), to)
        if hosting is None or part is None:
            return []
        assert all(hosting.deploy.assignment[node] == to for node, _slot in hop.targets)
        self.hops.append(hop)
        if hop.phase == "eval":
            return self._evaluated(to, part, hop, payload_RT)
        if hop.step in hosting.finished and hop.micro == 0:
            return [hosting.finished[hop.step]]
        if hop.step <= part.done or hop.attempt < hosting.attempts.get(hop.step, 0):
            return []
        if hop.attempt > hosting.attempts.get(hop.step, 0):
            self._renew(hosting, hop.step, hop.attempt)
        hosting.waiting.append((to, hop, payload_RT))
        return self._work(hosting)

    def _evaluated(self, to: PNodeId, part: Part, hop: Hop, payload_RT: np.ndarray) -> list[Report]:
        """A micro-batch of a validation. One that comes before the decision of its step is lost here; the real ones keep it."""
        if hop.step != part.done or to in self.stuck or hop.source_slot == 0:
            return []
        part.work += 1
        return [EvalLoss(to, hop.session, hop.epoch, hop.step, hop.targets[0][0], hop.micro, eval_loss(hop, payload_RT))]

    def _part(self, key: tuple[SessionId, Epoch], pnode: PNodeId) -> Part | None:
        hosting = self.hosted.get(key)
        return hosting.parts.get(pnode) if hosting else None

    def _deploy(self, pnode: PNodeId, deploy: Deploy) -> list[Report]:
        key = (deploy.session, deploy.epoch)
        newer = [epoch for (session, epoch), other in self.hosted.items() if session == key[0] and epoch > key[1] and pnode in other.parts]
        if newer:
            return []
        for (session, epoch), other in self.hosted.items():
            if session == key[0] and epoch < key[1]:
                other.parts.pop(pnode, None)
        if deploy.checkpoint in self.damaged:
            return [Refused(pnode, *key, "its sha256 is another one", damaged=True)]
        hosting = self.hosted.setdefault(key, Hosting(deploy))
        state = ScalerState(**deploy.state)  # type: ignore[arg-type]
        hosting.parts.setdefault(pnode, Part(deploy.step, state))
        return [Deployed(pnode, *key, deploy.step, 100)]

    def _undeploy(self, pnode: PNodeId, undeploy: Undeploy) -> None:
        for (session, epoch), hosting in self.hosted.items():
            if session == undeploy.session and epoch <= undeploy.epoch:
                hosting.parts.pop(pnode, None)
        self.hosted = {known: hosting for known, hosting in self.hosted.items() if hosting.parts}

    def _renew(self, hosting: Hosting, step: int, attempt: int) -> None:
        hosting.attempts[step] = attempt
        hosting.waiting = [item for item in hosting.waiting if item[1].step != step]
        hosting.fed = {place for place in hosting.fed if place[0] != step}
        hosting.losses.pop(step, None)
        hosting.reports.pop(step, None)

    def _work(self, hosting: Hosting) -> list[Report]:
        """What can be computed now: hops of a step wait until everyone has decided the step before."""
        if not hosting.whole or self.stuck & hosting.parts.keys():
            return []
        said: list[Report] = []
        step = min(part.done for part in hosting.parts.values()) + 1
        for to, hop, payload_RT in [item for item in hosting.waiting if item[1].step == step]:
            said += self._compute(hosting, to, hop, payload_RT)
        hosting.waiting = [item for item in hosting.waiting if item[1].step > step]
        return said + self._finished(hosting, step)

    def _compute(self, hosting: Hosting, to: PNodeId, hop: Hop, payload_RT: np.ndarray) -> list[Report]:
        place = (hop.step, hop.micro, hop.source_slot)
        if place in hosting.fed:
            return []
        hosting.fed.add(place)
        for part in hosting.parts.values():
            part.work += 1
        if hop.source_slot == 0:
            return []
        cost = hop.targets[0][0]
        loss = micro_loss(hop, payload_RT)
        hosting.losses.setdefault(hop.step, {})[cost, hop.micro] = loss
        return [] if hosting.deploy.decides else [Loss(to, hop.session, hop.epoch, hop.step, hop.attempt, cost, hop.micro, loss)]

    def _finished(self, hosting: Hosting, step: int) -> list[Report]:
        deploy = hosting.deploy
        if step in hosting.reports or sum(number == step for number, _, _ in hosting.fed) < deploy.micro_batches * 2:
            return []
        if deploy.decides:
            return self._done(hosting, step)
        hosting.reports[step] = {host: self._report(hosting, host, step) for host in sorted(hosting.parts)}
        return list(hosting.reports[step].values())

    def _report(self, hosting: Hosting, host: PNodeId, step: int) -> StepReport:
        deploy = hosting.deploy
        here = {node: 1.0 for node, home in deploy.assignment.items() if home == host}
        losses = tuple((cost, micro, loss) for (cost, micro), loss in hosting.losses[step].items() if cost in here)
        attempt = hosting.attempts.get(step, 0)
        return StepReport(host, deploy.session, deploy.epoch, step, attempt, here, step not in self.overflow, losses)

    def _done(self, hosting: Hosting, step: int) -> list[Report]:
        """The only PNode decides."""
        deploy = hosting.deploy
        ((pnode, part),) = hosting.parts.items()
        finite = step not in self.overflow
        hyper = Hyper.model_validate(deploy.hyper)
        verdict = decide(hyper, deploy.total_steps, step, part.scaler, [1.0] * len(deploy.assignment), finite)
        loss = sum(loss for _, loss in sorted(hosting.losses[step].items()))
        scale, state = part.scaler.loss_scale, asdict(verdict.state)
        part.scaler, part.done = verdict.state, step
        part.last = Decision(
            *hosting.key, step, verdict.skip, verdict.lr, verdict.lr_factor, verdict.grad_factor, loss, verdict.grad_norm, scale, state,
            hyper.saves(step, 0.0),
        )  # fmt: skip
        self._note(pnode, part.last)
        done = StepDone(pnode, *hosting.key, step, loss, verdict.grad_norm, verdict.skip, verdict.lr, scale, state)
        hosting.finished[step] = done
        saved: list[Report] = [self._save(hosting, pnode, step)] if part.last.save else []
        return [done, *saved, *self._work(hosting)]

    def _decided(self, hosting: Hosting, pnode: PNodeId, part: Part, decision: Decision) -> list[Report]:
        if decision.step != part.done + 1 or decision.step not in hosting.reports:
            return []
        part.done, part.last, part.scaler = decision.step, decision, ScalerState(**decision.state)  # type: ignore[arg-type]
        self._note(pnode, decision)
        saved: list[Report] = [self._save(hosting, pnode, decision.step)] if decision.save else []
        return saved + self._work(hosting)

    def _note(self, pnode: PNodeId, decision: Decision) -> None:
        """No two PNodes, epochs or attempts may ever do different things in one step."""
        self.times[pnode, decision.step] += 1
        did = (decision.loss, decision.skip)
        assert self.decided.setdefault(decision.step, did) == did, f"step {decision.step} was done in two ways"

    def _save(self, hosting: Hosting, pnode: PNodeId, step: int) -> Saved | SaveFailed:
        held = hosting.parts[pnode]
        if step in self.unsaved:
            return SaveFailed(pnode, *hosting.key, step, "the disk is full")
        state = asdict(held.scaler) if hosting.deploy.decides else None
        held.saved[step] = Saved(pnode, *hosting.key, step, part(pnode, hosting.deploy.session, step), state)
        return held.saved[step]
