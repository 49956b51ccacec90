"""Placement is invisible: the same network on one, two and three agents gives the same bits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest

from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.bus.memory import MemoryBroker
from dcnr.ids import NodeId, PNodeId
from dcnr.network.graph import Graph
from dcnr.placement.again import place_again
from dcnr.placement.place import Host, place
from dcnr.placement.segments import cut_segments
from tests.agents.tiny import NORMED, SEQ, TINY, VOCABULARY, A, B, C, alternate, deploy_of, graph_of, spread
from tests.integration.scripted import GIB, Trainer, agents, batches, info_of

STEPS = 6
BATCH = 6

Placing = Callable[[Graph, Sequence[PNodeId]], dict[NodeId, PNodeId]]


async def losses_of(
    text: str,
    homes: Mapping[NodeId, PNodeId],
    fuse: bool,
    micro_batches: int,
    hyper: Mapping[str, str | int | float | bool | None],
    threads: int,
) -> list[float]:
    """Train `STEPS` steps and return their losses."""
    broker = MemoryBroker()
    infos = [info_of(name) for name in sorted(set(homes.values()))]
    deploy = deploy_of(homes, text=text, fuse=fuse, batch=BATCH, micro_batches=micro_batches, hyper=hyper)
    async with agents(broker, NumpyBackend(), infos, threads):
        trainer = await Trainer.join(broker, graph_of(text, fuse), deploy, infos)
        try:
            await trainer.start()
            data = enumerate(batches(VOCABULARY, SEQ, BATCH, STEPS), 1)
            return [await trainer.step(step, tokens_BS) for step, tokens_BS in data]
        finally:
            await trainer.leave()


def train(
    pnodes: Sequence[PNodeId],
    placing: Placing = spread,
    *,
    text: str = TINY,
    fuse: bool = False,
    micro_batches: int = 2,
    threads: int = 2,
) -> list[float]:
    """The losses of a run on `pnodes`."""
    hyper: dict[str, str | int | float | bool | None] = {"lr": 0.03, "shards": 2, "clip_norm": 0.5}
    return asyncio.run(losses_of(text, placing(graph_of(text, fuse), pnodes), fuse, micro_batches, hyper, threads))


@pytest.mark.parametrize("fuse", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_losses_are_bit_equal_on_one_two_and_three_agents(fuse: bool, micro_batches: int) -> None:
    """Contiguous and scattered placements of a network give the losses of one agent, and these fall."""
    single = train([A], fuse=fuse, micro_batches=micro_batches)
    assert single[-1] < single[0]
    assert train([A, B], fuse=fuse, micro_batches=micro_batches) == single
    assert train([A, B, C], fuse=fuse, micro_batches=micro_batches) == single
    assert train([A, B, C], alternate, fuse=fuse, micro_batches=micro_batches) == single


@pytest.mark.parametrize("fuse", [False, True], ids=["plain", "fused"])
def test_a_host_with_two_runs_apart_gives_the_same_bits(fuse: bool) -> None:
    """The run of a lost host, taken by one that already has another further on, is a segment of its own there."""

    def patched(graph: Graph, pnodes: Sequence[PNodeId]) -> dict[NodeId, PNodeId]:
        before = place(graph, [Host(pnode, GIB, 1) for pnode in pnodes], BATCH)
        first, _lost, third, last = pnodes
        return dict(place_again(graph, [Host(first, 0, 1), Host(third, 0, 1), Host(last, GIB, 1)], BATCH, before))

    graph, pnodes = graph_of(fuse=fuse), [A, B, C, PNodeId("d")]
    order = [segment.pnode for segment in cut_segments(graph, patched(graph, pnodes))]
    assert order == ["a", "d", "c", "d", "a"]
    assert train(pnodes, patched, fuse=fuse) == train([A], fuse=fuse)


def test_threads_do_not_change_bits() -> None:
    """Two shards on one thread and on two give the same losses."""
    assert train([A], threads=1) == train([A], threads=2)


def test_a_residual_norm_has_two_outputs_wherever_its_readers_are() -> None:
    """Its normalised sum and the sum itself cross borders like any others."""
    single = train([A], text=NORMED, fuse=True)
    for placing in (spread, alternate):
        assert train([A, B, C], placing, text=NORMED, fuse=True) == single


@pytest.mark.parametrize("text", [TINY, NORMED], ids=["tiny", "normed"])
def test_fusion_and_micro_batches_change_no_more_than_rounding(text: str) -> None:
    """In float32, losses with and without fusion and with one or three micro-batches are within 1e-5."""
    single = train([A], text=text, micro_batches=1)
    assert train([A], text=text, fuse=True, micro_batches=1) == pytest.approx(single, rel=1e-5)
    assert train([A], text=text, micro_batches=3) == pytest.approx(single, rel=1e-5)
