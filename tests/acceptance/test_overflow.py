"""An overflow in float16: every VNode skips the same steps, on any number of agents, and the numbers are right afterwards."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dcnr.bus.messages import StepMetrics
from tests.acceptance.networks import small
from tests.acceptance.running import Cluster, listening, manifest, register, same_bits, tensors

pytestmark = [pytest.mark.nats, pytest.mark.timeout(150)]

STEPS = 12
SCALE = 2.0**21
"""Of the loss, so that its gradients are beyond the 65504 of float16 for a few halvings."""
WINDOW = 2
"""Good steps until the scale doubles, and the gradients overflow once more."""
LR, BETA1, BETA2, EPS = 0.01, 0.9, 0.99, 1e-8
HYPER: dict[str, Any] = {
    "optimizer": "adam", "lr": LR, "beta1": BETA1, "beta2": BETA2, "eps": EPS, "loss_scale": SCALE, "loss_scale_window": WINDOW,
    "keep_last": STEPS + 1,
}  # fmt: skip


def numbers(row: StepMetrics) -> tuple[float, ...]:
    """Of a step, all that does not depend on the clock."""
    return row.step, row.loss, row.lr, row.grad_norm, row.loss_scale, row.skipped


def adam(before: dict[str, np.ndarray], after: dict[str, np.ndarray], name: str, updates: int) -> np.ndarray:
    """What Adam (Kingma & Ba 2015, algorithm 1) makes of a weight in update number `updates`, given the new moments; float64."""
    m, v = (after[f"{name}:{moment}"].astype(np.float64) for moment in "mv")
    step = m / (1 - BETA1**updates) / (np.sqrt(v / (1 - BETA2**updates)) + EPS)
    return np.asarray(before[name] - LR * step)


async def train_by_step(url: str, session: str, pnodes: int) -> list[StepMetrics]:
    """The rows of a session that is asked for one step more each time it is done, so that it is saved after every step."""
    async with listening(url, session) as run:
        options: dict[str, Any] = {"network": "overflow", "dataset": "text", "batch": 4, "micro_batches": 2, "seed": 9, "hyper": HYPER}
        await run.ask("create", steps=1, pnodes=pnodes, **options)
        await run.until("done")
        for steps in range(2, STEPS + 1):
            await run.ask("resume", steps=steps)
            await run.until("done")
        return run.rows


async def test_every_vnode_skips_the_same_steps_and_counts_the_others(cluster: Cluster) -> None:
    """A skipped step changes no bit on any of three agents and halves the scale; Adam counts only the others; one agent does the same."""
    await register(cluster.url, small("overflow", "fp16"))
    rows, alone = [await train_by_step(cluster.url, f"overflow-{pnodes}", pnodes) for pnodes in (3, 1)]
    assert [numbers(row) for row in rows] == [numbers(row) for row in alone]
    skipped = [row.skipped for row in rows]
    assert skipped[0]
    assert True in skipped[skipped.index(False) :], "the scale grew until it overflowed again"

    scale, updates, good = SCALE, 0, 0
    before = await tensors(cluster.data_dir, "overflow-3", 0)
    for row in rows:
        assert row.loss_scale == scale
        assert math.isfinite(row.grad_norm) is not row.skipped
        after = await tensors(cluster.data_dir, "overflow-3", row.step)
        assert same_bits(after, await tensors(cluster.data_dir, "overflow-1", row.step))
        if row.skipped:
            assert same_bits(after, before)
            scale, good = scale / 2, 0
        else:
            updates, good = updates + 1, good + 1
            for name in (name for name in after if ":" not in name):
                np.testing.assert_allclose(after[name], adam(before, after, name, updates), rtol=0, atol=1e-3 * LR, err_msg=name)
                assert not np.array_equal(after[name], before[name]), f"{name} was not updated in step {row.step}"
            if good == WINDOW:
                scale, good = scale * 2, 0
        for session, parts in (("overflow-3", 3), ("overflow-1", 1)):
            saved = await manifest(cluster.data_dir, session, row.step)
            assert len(saved.parts) == parts
            assert (saved.state.updates, saved.state.loss_scale, saved.state.good_steps) == (updates, scale, good)
        before = after
