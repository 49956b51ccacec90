"""A small network, PNodes as data, and PNodes that speak the protocol of `bus/messages` without computing.

`tests/integration/test_training.py` runs the same orchestrator against the real agents, so these cannot drift from them unnoticed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cache

import numpy as np

from dcnr.bus.messages import (
    Decision,
    Deploy,
    Deployed,
    Hop,
    Hosted,
    Loss,
    PNodeInfo,
    Report,
    Save,
    Saved,
    SavedPart,
    StepDone,
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
HyperFields = dict[str, str | int | float | bool | None]


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


@dataclass
class Hosting:
    """A session on the fake PNodes."""

    deploy: Deploy
    scaler: ScalerState
    done: int
    reported: int = 0
    waiting: list[tuple[PNodeId, Hop, np.ndarray]] = field(default_factory=list)
    fed: list[tuple[int, int, int]] = field(default_factory=list)
    losses: dict[int, list[tuple[NodeId, int, float]]] = field(default_factory=dict)


class FakePNodes:
    """All PNodes at once: what one of them is told, and what they say to it. `overflow` names steps that are not finite."""

    def __init__(self, overflow: frozenset[int] = frozenset()) -> None:
        self.overflow = overflow
        self.hosted: dict[tuple[SessionId, Epoch], Hosting] = {}
        self.hops: list[Hop] = []

    def hosted_by(self, pnode: PNodeId) -> tuple[Hosted, ...]:
        """For its heartbeat."""
        return tuple(
            Hosted(session, epoch, hosting.done, 1, 100)
            for (session, epoch), hosting in self.hosted.items()
            if pnode in hosting.deploy.assignment.values()
        )

    def told(self, pnode: PNodeId, message: Deploy | Undeploy | Save | Decision) -> list[Report]:
        """A control message for `pnode`; a decision is for everyone."""
        key = (message.session, message.epoch)
        match message:
            case Deploy():
                state = ScalerState(**message.state)  # type: ignore[arg-type]
                self.hosted.setdefault(key, Hosting(message, state, message.step))
                return [Deployed(pnode, *key, message.step, 100)]
            case Undeploy():
                self.hosted.pop(key, None)
                return []
            case Save(step=step):
                hosting = self.hosted[key]
                assert hosting.done == step, "nothing is in flight when a step is to be saved"
                state_ = asdict(hosting.scaler) if hosting.deploy.decides else None
                return [Saved(pnode, *key, step, part(pnode, message.session, step), state_)]
            case Decision(step=step):
                return self._decided(self.hosted[key], step)

    def fed(self, to: PNodeId, hop: Hop, payload_RT: np.ndarray) -> list[Report]:
        """A hop of the trainer for `to`."""
        hosting = self.hosted[hop.session, hop.epoch]
        homes = hosting.deploy.assignment
        assert all(homes[node] == to for node, _slot in hop.targets)
        assert hosting.done < hop.step <= hosting.done + 3
        self.hops.append(hop)
        hosting.waiting.append((to, hop, payload_RT))
        return self._work(hosting)

    def _work(self, hosting: Hosting) -> list[Report]:
        """What can be computed now: hops of a step wait until the step before was decided."""
        said: list[Report] = []
        step = hosting.done + 1
        for to, hop, payload_RT in [item for item in hosting.waiting if item[1].step == step]:
            said += self._compute(hosting, to, hop, payload_RT)
        hosting.waiting = [item for item in hosting.waiting if item[1].step > step]
        return said + self._finished(hosting, step)

    def _compute(self, hosting: Hosting, to: PNodeId, hop: Hop, payload_RT: np.ndarray) -> list[Report]:
        hosting.fed.append((hop.step, hop.micro, hop.source_slot))
        if hop.source_slot == 0:
            return []
        cost = hop.targets[0][0]
        loss = micro_loss(hop, payload_RT)
        hosting.losses.setdefault(hop.step, []).append((cost, hop.micro, loss))
        return [] if hosting.deploy.decides else [Loss(to, hop.session, hop.epoch, hop.step, 0, cost, hop.micro, loss)]

    def _finished(self, hosting: Hosting, step: int) -> list[Report]:
        deploy = hosting.deploy
        if hosting.reported == step or sum(number == step for number, _, _ in hosting.fed) < deploy.micro_batches * 2:
            return []
        hosting.reported = step
        hosting.fed.clear()
        if deploy.decides:
            return self._done(hosting, step)
        hosts = sorted(set(deploy.assignment.values()))
        return [self._report(hosting, host, step) for host in hosts]

    def _report(self, hosting: Hosting, host: PNodeId, step: int) -> StepReport:
        deploy = hosting.deploy
        here = {node: 1.0 for node, home in deploy.assignment.items() if home == host}
        losses = tuple(entry for entry in hosting.losses[step] if entry[0] in here)
        return StepReport(host, deploy.session, deploy.epoch, step, 0, here, step not in self.overflow, losses)

    def _done(self, hosting: Hosting, step: int) -> list[Report]:
        deploy = hosting.deploy
        verdict = decide(
            Hyper.model_validate(deploy.hyper),
            deploy.total_steps,
            step,
            hosting.scaler,
            [1.0] * len(deploy.assignment),
            step not in self.overflow,
        )
        loss = sum(loss for _, _, loss in hosting.losses[step])
        scale, hosting.scaler, hosting.done = hosting.scaler.loss_scale, verdict.state, step
        done = StepDone(
            PNodeId(next(iter(deploy.assignment.values()))), deploy.session, deploy.epoch, step, loss, verdict.grad_norm, verdict.skip,
            verdict.lr, scale, asdict(verdict.state),
        )  # fmt: skip
        return [done, *self._saved(hosting, step), *self._work(hosting)]

    def _decided(self, hosting: Hosting, step: int) -> list[Report]:
        if step <= hosting.done:
            return []
        assert step == hosting.done + 1
        hosting.done = step
        return self._saved(hosting, step) + self._work(hosting)

    def _saved(self, hosting: Hosting, step: int) -> list[Report]:
        deploy = hosting.deploy
        every = Hyper.model_validate(deploy.hyper).checkpoint_every
        if not every or step % every:
            return []
        state = asdict(hosting.scaler) if deploy.decides else None
        hosts = sorted(set(deploy.assignment.values()))
        return [Saved(host, deploy.session, deploy.epoch, step, part(host, deploy.session, step), state) for host in hosts]
