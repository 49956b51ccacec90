"""Training survives the end of every process: what follows is, bit for bit, what a run that never stopped does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from dcnr.bus.messages import StepMetrics
from tests.acceptance.networks import VOCABULARY, small
from tests.acceptance.running import Cluster, listening, make_dataset, manifest, register, same_bits, tensors, train, up

pytestmark = [pytest.mark.nats, pytest.mark.timeout(240)]

AFTER = 20
"""Steps that are compared, at least."""
EVERY = 10
"""Steps between checkpoints."""
FOREVER = 100_000
HYPER: dict[str, Any] = {
    "optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_norm": 1.0, "checkpoint_every": EVERY,
    "schedule": "cosine", "warmup_steps": 15, "decay_steps": 5000, "loss_scale": 1024.0, "loss_scale_window": 7,
}  # fmt: skip
OPTIONS: dict[str, Any] = {"network": "saved", "batch": 4, "micro_batches": 2, "seed": 3, "hyper": HYPER}

Numbers = tuple[int, float, float, float, float, bool]


def numbers(rows: list[StepMetrics]) -> list[Numbers]:
    """Of all steps, what does not depend on the clock."""
    return [(row.step, row.loss, row.lr, row.loss_scale, row.grad_norm, row.skipped) for row in rows]


async def begin(cluster: Cluster, session: str, pnodes: int) -> list[StepMetrics]:
    """The first steps of a session that goes on training."""
    async with listening(cluster.url, session) as run:
        await run.ask("create", dataset="text", steps=FOREVER, pnodes=pnodes, **OPTIONS)
        await run.until_step(3 * EVERY + 3)
        return run.rows


async def suspend(cluster: Cluster, session: str) -> None:
    """By the command, which returns when it is done."""
    shown = json.loads(await asyncio.to_thread(cluster.dcnr, "session", "suspend", session, "--json"))
    assert shown == {"session": session, "state": "suspended"}


async def resume(cluster: Cluster, session: str, steps: int) -> list[StepMetrics]:
    """By the command: the steps that follow, up to `steps`."""
    async with listening(cluster.url, session) as run:
        await asyncio.to_thread(cluster.dcnr, "session", "resume", session, "--steps", str(steps))
        await run.until("done")
        return run.rows


async def test_a_run_goes_on_bit_for_bit_after_everything_was_stopped(tmp_path: Path) -> None:
    """One session is suspended, another loses its cluster in mid-run; on a new cluster one goes on with as many agents when it is told to,
    the other, with more, by itself."""
    make_dataset(tmp_path, VOCABULARY)
    with up(tmp_path, agents=2) as cluster:
        await register(cluster.url, small("saved", "fp16"))
        first = {"asleep": await begin(cluster, "asleep", pnodes=2)}
        await suspend(cluster, "asleep")
        first["cut"] = await begin(cluster, "cut", pnodes=0)
    with up(tmp_path, agents=3) as cluster:
        states = {row["session"]: row["state"] for row in json.loads(cluster.dcnr("session", "list", "--json"))["sessions"]}
        assert states["asleep"] == "suspended"
        assert states["cut"] in {"waiting", "adopting", "deploying", "running"}
        await suspend(cluster, "cut")
        saved = {name: (await manifest(tmp_path, name)).step for name in first}
        total = max(saved.values()) + AFTER
        whole = numbers(await train(cluster.url, "whole", steps=total, pnodes=2, **OPTIONS))
        resumed = {name: numbers(await resume(cluster, name, total)) for name in saved}
    assert len({row[3] for row in whole[-AFTER:]}) > 1, "the loss scale moves"
    for name, agents in (("asleep", 2), ("cut", 3)):
        assert len((await manifest(tmp_path, name)).parts) == agents
        assert numbers(first[name]) == whole[: len(first[name])], name
        assert resumed[name] == whole[saved[name] :], name
        assert same_bits(await tensors(tmp_path, name, total), await tensors(tmp_path, "whole", total)), name
