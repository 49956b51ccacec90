"""A resumed run is the run that never stopped: step, data, dropout, schedule, loss scale and moments go on exactly, however often."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from dcnr.bus import subjects
from dcnr.bus.codec import decode_with_payload
from dcnr.bus.messages import TRAINER, Hop, StepMetrics
from dcnr.client.connect import connection
from dcnr.data.batches import windows_per_epoch
from dcnr.data.dataset import Dataset
from dcnr.ids import NetworkId, NodeId, SessionId
from dcnr.metrics.history import History
from tests.acceptance.networks import SEQ, VOCABULARY, small
from tests.acceptance.running import (
    PATIENCE,
    TEXT,
    Cluster,
    Run,
    listening,
    make_dataset,
    manifest,
    register,
    same_bits,
    tensors,
    up,
)
from tests.cli.conftest import start_up, strays

pytestmark = [pytest.mark.nats, pytest.mark.timeout(240)]

BATCH, MICRO_BATCHES, SEED = 4, 2, 11
HYPER: dict[str, Any] = {
    "optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_norm": 1.0, "schedule": "cosine", "warmup_steps": 5,
    "decay_steps": 25, "loss_scale": 2.0**21, "loss_scale_window": 3,
}  # fmt: skip
"""The first steps overflow float16, and so does one every few good ones. The schedule has its own end, so that a run may get longer."""
NETWORK = small("resumed", "fp16")
FOREVER = 100_000
STEPS = 200
"""Too many to be done before a cluster can be killed."""

Numbers = tuple[int, float, float, float, float, bool]


def numbers(rows: list[StepMetrics]) -> list[Numbers]:
    """Of all steps, what does not depend on the clock."""
    return [(row.step, row.loss, row.lr, row.loss_scale, row.grad_norm, row.skipped) for row in rows]


class Fed:
    """What the trainer sends to the embedder of one session, as it goes over the wire."""

    def __init__(self, session: str) -> None:
        self.session = SessionId(session)
        self.rows_RT: list[tuple[int, int, np.ndarray]] = []
        """(step, micro-batch, ids), in the order in which they came."""

    def on_message(self, data: bytes) -> None:
        """Bus callback."""
        hop, payload = decode_with_payload(data)
        if isinstance(hop, Hop) and hop.source == TRAINER and hop.session == self.session:
            assert hop.lane == "inline"
            self.rows_RT.append((hop.step, hop.micro, np.frombuffer(payload, hop.dtype).reshape(hop.shape)))

    def check(self, dataset: Dataset, steps: int) -> None:
        """Every step got, once, the windows that follow those of the step before."""
        assert [(step, micro) for step, micro, _ in self.rows_RT] == [
            (step, micro) for step in range(1, steps + 1) for micro in range(MICRO_BATCHES)
        ]
        fed = np.concatenate([ids for _, _, ids in self.rows_RT])
        wanted = [dataset.batch("train", SEED, step, BATCH, SEQ)[:, :-1] for step in range(1, steps + 1)]
        np.testing.assert_array_equal(fed, np.concatenate(wanted))


@asynccontextmanager
async def hearing(url: str, fed: Fed) -> AsyncIterator[None]:
    """Adds to `fed`."""
    async with connection(url) as bus:
        await bus.subscribe(subjects.hop(NetworkId("resumed"), NodeId("embedder"), "fwd"), fed.on_message)
        yield


async def train(url: str, session: str, steps: int, pnodes: int) -> list[StepMetrics]:
    """The rows of a new session that is done at `steps`."""
    async with listening(url, session) as run:
        await create(run, steps, pnodes)
        await run.until("done")
        return run.rows


async def create(run: Run, steps: int, pnodes: int, **hyper: Any) -> None:
    """Begin the session of `run`."""
    options: dict[str, Any] = {"batch": BATCH, "micro_batches": MICRO_BATCHES, "seed": SEED, "hyper": HYPER | hyper}
    await run.ask("create", network="resumed", dataset="text", steps=steps, pnodes=pnodes, **options)


async def extend(cluster: Cluster, session: str, steps: int) -> list[StepMetrics]:
    """The rows that follow when the command asks for more steps."""
    async with listening(cluster.url, session) as run:
        await asyncio.to_thread(cluster.dcnr, "session", "resume", session, "--steps", str(steps))
        await run.until("done")
        return run.rows


async def check_same(data_dir: Path, session: str, whole: str, step: int) -> None:
    """At `step` both have the same weights, moments, update count, scale and growth counter."""
    ours, theirs = await manifest(data_dir, session, step), await manifest(data_dir, whole, step)
    assert ours.state == theirs.state
    assert same_bits(await tensors(data_dir, session, step), await tensors(data_dir, whole, step))


async def test_more_steps_on_other_agents_three_times(tmp_path: Path) -> None:
    """Steps 1 to 7 on three agents, to 12 on one, to 19 on two, to 30 on three, each time in a new cluster, across overflows, the end of
    the warm-up, two ends of the data and the end of the schedule: every number and bit is that of 30 steps without a stop."""
    make_dataset(tmp_path, VOCABULARY, TEXT[:500])
    dataset, fed, rows, whole = Dataset.open(tmp_path, "text"), Fed("parts"), list[StepMetrics](), list[StepMetrics]()
    assert windows_per_epoch(dataset.manifest.train_tokens, SEQ) * 2 < 30 * BATCH
    for agents, steps in ((3, 7), (1, 12), (2, 19), (3, 30)):
        with up(tmp_path, agents) as cluster:
            if not rows:
                await register(cluster.url, NETWORK)
                whole = await train(cluster.url, "whole", 30, pnodes=2)
            async with hearing(cluster.url, fed):
                rows += await extend(cluster, "parts", steps) if rows else await train(cluster.url, "parts", steps, pnodes=0)
        assert len((await manifest(tmp_path, "parts")).parts) == agents
    skipped = [row.skipped for row in whole]
    assert True in skipped[12:19]
    assert False in skipped[7:12]
    assert numbers(rows) == numbers(whole)
    fed.check(dataset, 30)
    await check_same(tmp_path, "parts", "whole", 30)


@pytest.mark.parametrize("pnodes", [1, 3])
async def test_suspended_in_mid_run_three_times(cluster: Cluster, pnodes: int) -> None:
    """At whatever step it stops: every step has one row and its own windows once, and the end is that of a run without a stop."""
    await register(cluster.url, NETWORK)
    session, whole = f"suspended-{pnodes}", f"unsuspended-{pnodes}"
    fed = Fed(session)
    async with listening(cluster.url, session) as run, hearing(cluster.url, fed):
        await create(run, FOREVER, pnodes)
        for last in (False, False, True):
            await run.until_step((run.rows[-1].step if run.rows else 0) + 5)
            await run.ask("suspend")
            await run.until("suspended")
            total = run.rows[-1].step + 5
            await run.ask("resume", steps=total if last else FOREVER)
        await run.until("done")
    assert numbers(run.rows) == numbers(await train(cluster.url, whole, total, pnodes=2))
    fed.check(Dataset.open(cluster.data_dir, "text"), total)
    await check_same(cluster.data_dir, session, whole, total)


@pytest.mark.parametrize("damage", ["a bit of a part", "half a manifest", "no part"])
async def test_a_damaged_checkpoint_is_passed_over(cluster: Cluster, damage: str) -> None:
    """A resume goes on from the one before it: the steps in between are done once more, and nothing else differs."""
    await register(cluster.url, NETWORK)
    session, whole = (f"{kind}-{damage.split()[-1]}-{damage.split()[0]}" for kind in ("damaged", "intact"))
    async with listening(cluster.url, session) as run:
        await create(run, 12, pnodes=3, checkpoint_every=5)
        await run.until("done")
    newest = cluster.data_dir / "checkpoints" / session / f"{12:010d}"
    parts = sorted(newest.glob("*.safetensors"))
    match damage:
        case "a bit of a part":
            data = bytearray(parts[1].read_bytes())
            data[len(data) // 2] ^= 1
            parts[1].write_bytes(data)
        case "half a manifest":
            path = newest / "manifest.json"
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        case "no part":
            parts[1].unlink()
    rows = await extend(cluster, session, 20)
    assert numbers(rows) == numbers(await train(cluster.url, whole, 20, pnodes=2))[10:]
    await check_same(cluster.data_dir, session, whole, 20)


def cut_power(process: subprocess.Popen[str]) -> None:
    """SIGKILL to `dcnr up` and all below it. It is stopped first, so that it starts nobody again; its guard would end them in order."""
    parent = psutil.Process(process.pid)
    parent.suspend()
    for one in (*parent.children(recursive=True), parent):
        one.kill()
    process.communicate()


async def test_after_a_power_cut_training_goes_on_by_itself(tmp_path: Path) -> None:
    """SIGKILL to everything, server included, between two checkpoints; `dcnr up` is all it takes. Steps that were lost come again, and
    whenever one is told it is told alike; the log has every step once."""
    make_dataset(tmp_path, VOCABULARY)
    process, ready = start_up(tmp_path, "--agents", "3", "--backend", "cpu")
    await register(ready["url"], NETWORK)
    async with listening(ready["url"], "cut") as run:
        await create(run, STEPS, pnodes=0, checkpoint_every=10)
        await run.until_step(33)
        cut_power(process)
    until = time.monotonic() + PATIENCE
    while strays(tmp_path):
        assert time.monotonic() < until
        await asyncio.sleep(0.05)
    with up(tmp_path, agents=2) as cluster:
        async with listening(cluster.url, "cut") as again:
            await again.until("done")
        whole = numbers(await train(cluster.url, "uncut", STEPS, pnodes=1))
    assert run.rows[-1].step < STEPS
    assert again.rows[0].epoch > run.rows[-1].epoch
    assert all(row == whole[row[0] - 1] for row in numbers(run.rows + again.rows))
    assert numbers(History(tmp_path).rows(SessionId("cut"))) == whole
    await check_same(tmp_path, "cut", "uncut", STEPS)
