"""What a session survives: a move by checkpoint, overflows, messages that come twice or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from dcnr.agents.shell import Shell
from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import Deploy, Saved, StepReport
from dcnr.ids import NodeId, PNodeId
from dcnr.optim.decide import ScalerState
from dcnr.storage.base import open_storage
from dcnr.storage.checkpoint import Manifest, write_manifest
from tests.agents.tiny import SEQ, TINY, VOCABULARY, A, B, C, alternate, deploy_of, graph_of, manifest_of, spread
from tests.integration.scripted import Trainer, agents, batches, info_of

BATCH = 6
HALF = TINY.replace("name: tiny", "name: tiny\nprecision: fp16")


@asynccontextmanager
async def cluster(deploy: Deploy) -> AsyncIterator[tuple[dict[PNodeId, Shell], Trainer]]:
    """The agents of a deploy, deployed."""
    broker = MemoryBroker()
    infos = [info_of(name) for name in sorted(set(deploy.assignment.values()))]
    trainer = await Trainer.join(broker, graph_of(deploy.network_file, deploy.fuse), deploy, infos)
    try:
        async with agents(broker, NumpyBackend(), infos) as shells:
            await trainer.start()
            yield shells, trainer
    finally:
        await trainer.leave()


def test_a_session_goes_on_elsewhere_with_the_same_bits(tmp_path: Path) -> None:
    """Three agents save every second step; one agent, from the checkpoint of step 2, gives the same next losses."""
    data = batches(VOCABULARY, SEQ, BATCH, 5)
    hyper: dict[str, str | int | float | bool | None] = {"lr": 0.03, "checkpoint_every": 2, "schedule": "cosine", "warmup_steps": 2}
    graph = graph_of()

    async def first() -> tuple[list[float], Manifest]:
        deploy = deploy_of(alternate(graph, [A, B, C]), hyper=hyper, storage=f"file://{tmp_path}")
        async with cluster(deploy) as (_, trainer):
            losses, states = [], []
            for step, tokens_BS in enumerate(data, 1):
                losses.append(await trainer.step(step, tokens_BS))
                states.append(trainer.state)
            await trainer.until(lambda: len(trainer.reports(Saved, 2)) == 3)
            parts = [report.part for report in trainer.reports(Saved, 2).values() if isinstance(report, Saved)]
            return losses, manifest_of(deploy, parts, 2, states[1])

    async def second(manifest: Manifest) -> list[float]:
        await write_manifest(open_storage(f"file://{tmp_path}"), manifest)
        deploy = deploy_of(
            dict.fromkeys(graph.by_id, A), hyper=hyper, storage=f"file://{tmp_path}", checkpoint=manifest.key, step=2,
            scaler=manifest.state, epoch=2,
        )  # fmt: skip
        async with cluster(deploy) as (_, trainer):
            return [await trainer.step(step, tokens_BS) for step, tokens_BS in enumerate(data, 1) if step > 2]

    losses, manifest = asyncio.run(first())
    assert asyncio.run(second(manifest)) == losses[2:]


def test_an_overflow_makes_everyone_skip_the_same_step() -> None:
    """From a scale that is far too large, steps are skipped until it fits; updates count only applied ones, on one and on three agents."""
    data = batches(VOCABULARY, SEQ, BATCH, 8)
    scaler = ScalerState(loss_scale=2.0**24, dynamic=True)
    graph = graph_of(HALF)

    async def run(homes: Mapping[NodeId, PNodeId]) -> tuple[list[float], list[bool], ScalerState]:
        async with cluster(deploy_of(homes, text=HALF, scaler=scaler)) as (_, trainer):
            losses = [await trainer.step(step, tokens_BS) for step, tokens_BS in enumerate(data, 1)]
            return losses, [verdict.skip for _, verdict in sorted(trainer.verdicts.items())], trainer.state

    losses, skips, state = asyncio.run(run(spread(graph, [A, B, C])))
    assert skips[0]
    assert not skips[-1]
    assert state.updates == skips.count(False)
    assert state.loss_scale == 2.0 ** (24 - skips.count(True))
    alone, _, _ = asyncio.run(run(dict.fromkeys(graph.by_id, A)))
    assert alone == losses


def test_hops_that_come_twice_change_nothing() -> None:
    """Everything the trainer sends is sent twice, and out of order."""
    data = batches(VOCABULARY, SEQ, BATCH, 3)
    graph = graph_of()

    async def run(twice: bool) -> list[float]:
        async with cluster(deploy_of(spread(graph, [A, B]))) as (shells, trainer):
            losses = []
            for step, tokens_BS in enumerate(data, 1):
                if twice:
                    rows = BATCH // 2
                    for micro in (1, 0):
                        await trainer.send(step, micro, 0, tokens_BS[micro * rows : (micro + 1) * rows, :-1], 0.0)
                losses.append(await trainer.step(step, tokens_BS))
            assert (sum(shell.telemetry.dropped.total() for shell in shells.values()) > 0) == twice
            return losses

    assert asyncio.run(run(twice=True)) == asyncio.run(run(twice=False))


def test_a_decision_that_was_lost_is_asked_for_again() -> None:
    """The report of a step comes again until the decision is there; then the next step runs."""
    data = batches(VOCABULARY, SEQ, BATCH, 2)

    async def run() -> None:
        async with cluster(deploy_of(spread(graph_of(), [A, B]))) as (_, trainer):
            await trainer.feed(1, data[0])
            await trainer.until(lambda: len(trainer.reports(StepReport, 1)) == 2)
            trainer.heard.clear()
            await trainer.until(lambda: len(trainer.reports(StepReport, 1)) == 2)
            await trainer.decide(1)
            assert await trainer.step(2, data[1]) > 0

    asyncio.run(run())


def test_steps_fed_ahead_wait_their_turn() -> None:
    """Three steps at once, on one agent and on two, give the losses of one after the other."""
    data = batches(VOCABULARY, SEQ, BATCH, 3)
    graph = graph_of()

    async def run(homes: Mapping[NodeId, PNodeId], ahead: bool) -> list[float]:
        async with cluster(deploy_of(homes)) as (_, trainer):
            if ahead:
                for step, tokens_BS in enumerate(data, 1):
                    await trainer.feed(step, tokens_BS)
            return [await trainer.step(step, tokens_BS) for step, tokens_BS in enumerate(data, 1)]

    for homes in (dict.fromkeys(graph.by_id, A), spread(graph, [A, B])):
        assert asyncio.run(run(homes, ahead=True)) == asyncio.run(run(homes, ahead=False))
