"""What is trained: small networks, their data, and what an undisturbed run of one process makes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np

from dcnr.agents.commands import Evaluate, Pass
from dcnr.agents.crew import Crew
from dcnr.agents.execution import Execution
from dcnr.agents.plan import make_plan
from dcnr.backends.base import HostArray
from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.bus.messages import Deploy
from dcnr.ids import Epoch, NetworkId, PNodeId, SessionId
from dcnr.network.graph import Graph
from dcnr.optim.decide import initial_state
from dcnr.optim.hyper import Hyper
from dcnr.orchestrator.feed import batch_of, windows_of
from dcnr.orchestrator.planning import prepared
from dcnr.placement.groups import together
from dcnr.placement.place import Problem

NETWORK, SESSION = NetworkId("net"), SessionId("run")
SEED, BATCH, SEQ, VOCABULARY = 7, 4, 3, 11
HyperFields = dict[str, str | int | float | bool | None]

CHAIN = """
name: net
nodes:
  - {id: embed, type: embedder, config: {vocab_size: 11, dim: 4, seq_len: 3}}
  - {id: up, type: linear, config: {in_dim: 4, out_dim: 6}}
  - {id: act, type: relu, config: {}}
  - {id: down, type: linear, config: {in_dim: 6, out_dim: 4}}
  - {id: head, type: linear, config: {in_dim: 4, out_dim: 11}}
  - {id: loss, type: cost, config: {cost_function: ce_logits, vocab_size: 11}}
edges:
  - {from: embed, to: up}
  - {from: up, to: act}
  - {from: act, to: down}
  - {from: down, to: head}
  - {from: head, to: loss}
costs: [{name: ce, node_id: loss}]
"""
LOOP = """
name: net
nodes:
  - {id: embed, type: embedder, config: {vocab_size: 11, dim: 4, seq_len: 3, position_encoding: none,
     shared_weight_alias: tokens, colocate_group: tokens, colocate_policy: required}}
  - {id: split, type: broadcast, config: {num_outputs: 2}}
  - {id: mix, type: linear, config: {in_dim: 4, out_dim: 4}}
  - {id: drop, type: dropout, config: {rate: 0.2}}
  - {id: sum, type: add, config: {}}
  - {id: norm, type: layernorm, config: {dim: 4}}
  - {id: head, type: linear, config: {in_dim: 4, out_dim: 11, bias: false,
     tie_weight_alias: tokens, colocate_group: tokens, colocate_policy: required}}
  - {id: loss, type: cost, config: {cost_function: ce_logits, vocab_size: 11}}
edges:
  - {from: embed, to: split}
  - {from: split, from_slot: 0, to: mix}
  - {from: mix, to: drop}
  - {from: drop, to: sum, to_slot: 0}
  - {from: split, from_slot: 1, to: sum, to_slot: 1}
  - {from: sum, to: norm}
  - {from: norm, to: head}
  - {from: head, to: loss}
costs: [{name: ce, node_id: loss}]
"""


@dataclass(frozen=True, slots=True)
class Variant:
    """A network and how it is trained."""

    name: str
    file: str
    hyper: tuple[tuple[str, str | int | float | bool | None], ...]
    micro_batches: int = 2

    @property
    def fields(self) -> HyperFields:
        """Its hyper-parameters."""
        return dict(self.hyper)


def _hyper(**fields: str | int | float | bool | None) -> tuple[tuple[str, str | int | float | bool | None], ...]:
    return tuple(fields.items())


HALF = CHAIN.replace("name: net", "name: net\nprecision: float16")
"""The first steps overflow, and later ones now and then."""
VARIANTS = (
    Variant("chain", CHAIN, _hyper(lr=0.05, clip_norm=0.5)),
    Variant("loop", LOOP, _hyper(lr=0.02, weight_decay=0.1, shards=1)),
    Variant("momentum", CHAIN, _hyper(optimizer="sgd", lr=0.1, schedule="cosine", decay_steps=9, warmup_steps=2, shards=1), 4),
    Variant("half", HALF, _hyper(lr=0.02, loss_scale=2.0**24, loss_scale_window=2, shards=1)),
)


def tokens(step: int) -> np.ndarray:
    """The ids [B, T + 1] of a step."""
    return np.random.default_rng((SEED, step)).integers(0, VOCABULARY, (BATCH, SEQ + 1))


WINDOWS = 7
"""Of the validation split; the last one is a target short."""


@cache
def windows() -> np.ndarray:
    """Their ids [7, T + 1], each beginning with the last one of the one before."""
    ids = np.random.default_rng((SEED, 0)).integers(0, VOCABULARY, WINDOWS * SEQ + 1)
    ids[-1] = -1
    return np.stack([ids[at * SEQ : (at + 1) * SEQ + 1] for at in range(WINDOWS)])


@cache
def graph_of(file: str) -> Graph:
    """The prepared graph."""
    return prepared(file, "net.yml", fuse=False)


@cache
def bytes_of(variant: Variant) -> int:
    """Memory that the network takes on one PNode."""
    graph = graph_of(variant.file)
    return Problem.of(graph, together(graph), BATCH // variant.micro_batches).memory[-1]


@dataclass(frozen=True, slots=True)
class Reference:
    """What a run must give: the loss of each step, from 1 on, that of the validation after it, and the canonical tensors after the last."""

    losses: tuple[float, ...]
    validations: tuple[float, ...]
    tensors: Mapping[str, HostArray]


def _validation(execution: Execution, segment: int, step: int, rows: int) -> float:
    """The loss of the validation split after a step."""
    total, counted = 0.0, 0
    for micro, first in enumerate(range(0, WINDOWS, rows)):
        batch = windows_of(windows()[first : first + rows])
        evaluate = Evaluate(SESSION, Epoch(1), segment, step, micro, (batch.ids_BT, batch.targets_BT), (0.0, batch.weight))
        ((_, loss),) = execution.evaluate(evaluate)().losses
        total, counted = total + loss * batch.counted, counted + batch.counted
    return total / counted


def ends_after(variant: Variant, hyper: Hyper, steps: int) -> int:
    """The last step of a run of `steps`: an earlier one, where so many validations in a row as its patience had no smaller loss."""
    if not hyper.patience:
        return steps
    best, without = math.inf, 0
    for step, loss in enumerate(reference(variant, steps).validations, 1):
        if hyper.validates(step, steps):
            best, without = min(best, loss), 0 if loss < best else without + 1
            if without >= hyper.patience:
                return step
    return steps


@cache
def reference(variant: Variant, steps: int) -> Reference:
    """By a plain loop over one `Execution` that holds the whole network."""
    graph, alone = graph_of(variant.file), PNodeId("alone")
    hyper = Hyper.model_validate(variant.fields)
    float16 = any("float16" in (node.param_precision, node.activation_precision) for node in graph.nodes)
    deploy = Deploy(
        network=NETWORK, session=SESSION, epoch=Epoch(1), network_file=variant.file, fuse=False,
        assignment={str(node.id): alone for node in graph.nodes}, peers=(), hyper=variant.fields,
        state={**asdict(initial_state(hyper, float16))}, seed=SEED, total_steps=steps, micro_batches=variant.micro_batches, batch=BATCH,
        step=0, storage="", checkpoint=None, decides=True,
    )  # fmt: skip
    plan = make_plan(deploy, alone)
    execution = Execution(NumpyBackend(), Crew(1), deploy, plan)
    execution.load(None)
    (segment,) = plan.routes.segments
    losses, validations = [], []
    for step in range(1, steps + 1):
        batch, rows = batch_of(tokens(step)), BATCH // variant.micro_batches
        for micro in range(variant.micro_batches):
            part = slice(micro * rows, (micro + 1) * rows)
            inputs = (batch.ids_BT[part], batch.targets_BT[part])
            execution.run(Pass(SESSION, deploy.epoch, segment.index, step, micro, inputs, (0.0, batch.weight), ()))
        _, found = execution.settle(step)()
        losses.append(sum(loss for _, _, loss in found))
        validations.append(_validation(execution, segment.index, step, rows))
    return Reference(tuple(losses), tuple(validations), execution.snapshot()()[0])
