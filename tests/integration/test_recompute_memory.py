"""Recomputation is invisible: a run whose groups run their forward again has the losses of one that keeps everything, bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest

from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.bus.memory import MemoryBroker
from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Graph
from tests.agents.tiny import SEQ, TINY, VOCABULARY, A, B, C, alternate, deploy_of, graph_of, in_groups, spread
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
