"""Recomputation is invisible: a run whose groups run their forward again has the losses of one that keeps everything, bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest

from dcnr.agents.commands import Pass
from dcnr.agents.crew import Crew
from dcnr.agents.execution import Execution
from dcnr.backends.base import Backend, HostArray
from dcnr.backends.cupy.backend import CupyBackend
from dcnr.backends.load import load_backend
from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.bus.memory import MemoryBroker
from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Graph
from dcnr.optim.decide import ScalerState
from tests.agents.tiny import SEQ, TINY, VOCABULARY, A, B, C, alone, alternate, deploy_of, graph_of, in_groups, spread
from tests.backends.cupy.emulator.device import EmulatedDevice
from tests.integration.scripted import Trainer, agents, batches, info_of

STEPS = 4
BATCH = 6

Placing = Callable[[Graph, Sequence[PNodeId]], dict[NodeId, PNodeId]]


async def losses_of(text: str, homes: Mapping[NodeId, PNodeId], fuse: bool, micro_batches: int, shards: int) -> list[float]:
    """Train `STEPS` steps and return their losses."""
    broker = MemoryBroker()
    infos = [info_of(name) for name in sorted(set(homes.values()))]
    hyper: dict[str, str | int | float | bool | None] = {"lr": 0.03, "shards": shards, "clip_norm": 0.5}
    deploy = deploy_of(homes, text=text, fuse=fuse, batch=BATCH, micro_batches=micro_batches, hyper=hyper)
    async with agents(broker, NumpyBackend(), infos, 2):
        trainer = await Trainer.join(broker, graph_of(text, fuse), deploy, infos)
        try:
            await trainer.start()
            data = enumerate(batches(VOCABULARY, SEQ, BATCH, STEPS), 1)
            return [await trainer.step(step, tokens_BS) for step, tokens_BS in data]
        finally:
            await trainer.leave()


def train(recompute: bool, pnodes: Sequence[PNodeId], placing: Placing, fuse: bool, micro_batches: int, shards: int) -> list[float]:
    """The losses of a run on `pnodes`."""
    text = in_groups(TINY, recompute)
    return asyncio.run(losses_of(text, placing(graph_of(text, fuse), pnodes), fuse, micro_batches, shards))


@pytest.mark.parametrize("fuse", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize(("micro_batches", "shards"), [(1, 1), (3, 2)])
@pytest.mark.parametrize(
    ("pnodes", "placing"), [([A], spread), ([A, B], spread), ([A, B, C], alternate)], ids=["one", "two", "three, scattered"]
)
def test_losses_are_bit_equal_with_and_without_recomputation(
    pnodes: list[PNodeId], placing: Placing, micro_batches: int, shards: int, fuse: bool
) -> None:
    """With dropout in a group, several micro-batches and row shards, on one to three agents."""
    kept = train(False, pnodes, placing, fuse, micro_batches, shards)
    assert kept[-1] < kept[0]
    assert train(True, pnodes, placing, fuse, micro_batches, shards) == kept


def weights_after(backend: Backend, recompute: bool) -> dict[str, HostArray]:
    """Everything that a run of three steps of two micro-batches leaves, in float16, from an executor of `backend`."""
    text = in_groups(TINY, recompute).replace("name: tiny", "name: tiny\nprecision: fp16")
    deploy, plan = alone(text=text, fuse=True, hyper={"lr": 0.03, "clip_norm": 0.5}, scaler=ScalerState(loss_scale=64.0, dynamic=True))
    execution = Execution(backend, Crew(2), deploy, plan)
    execution.load(None)
    (routes,) = plan.routes.segments
    for step, tokens_BS in enumerate(batches(VOCABULARY, SEQ, BATCH, 3), 1):
        for micro, rows in enumerate((slice(0, 3), slice(3, 6))):
            ids, targets = tokens_BS[rows, :-1], tokens_BS[rows, 1:]
            inputs = tuple(ids if entry.consumers[0].node == "embedder" else targets for entry in routes.inputs)
            weights = tuple(1 / (BATCH * SEQ) for _ in inputs)
            execution.run(Pass(deploy.session, deploy.epoch, routes.index, step, micro, inputs, weights, ()))()
        execution.settle(step)()
    tensors, _ = execution.snapshot()()
    return dict(tensors)


@pytest.mark.parametrize("name", ["cpu", "cupy"])
def test_every_backend_recomputes_to_the_same_bits(name: str) -> None:
    """Weights and moments after three steps; on a GPU the passes are recorded ones."""
    kept, again = (
        weights_after(CupyBackend(EmulatedDevice(80)) if name == "cupy" else load_backend(name), which) for which in (False, True)
    )
    assert kept.keys() == again.keys()
    assert any(value.any() for tensor, value in kept.items() if tensor.endswith(":m"))
    for tensor, value in kept.items():
        assert value.tobytes() == again[tensor].tobytes(), tensor
