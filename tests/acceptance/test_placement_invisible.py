"""Placement is invisible with real processes: the same losses, bit for bit, on 1, 2, 3 and 8 agents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dcnr.network.load import load_graph
from dcnr.passes import prepare
from dcnr.placement.groups import together
from tests.acceptance.networks import small
from tests.acceptance.running import Cluster, losses, manifest, register, train

pytestmark = [pytest.mark.nats, pytest.mark.timeout(150)]

STEPS, BATCH, SEED = 20, 8, 5
PLACEMENTS = (1, 2, 3, 8)
HYPER: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "clip_norm": 1.0, "schedule": "cosine", "warmup_steps": 3}
RELATIVE = 1e-5
"""How far fusion and micro-batches may move a loss in float32."""
NETWORK = small("invisible", "float32")


def test_the_network_has_every_fusion_and_parts_for_eight() -> None:
    """So that the test below says something."""
    graph = load_graph(NETWORK, "network.yml")
    fused = prepare(graph, fuse=True)
    kinds = {node.type for node in fused.nodes}
    assert {"fused_heads", "fused_lm_head", "linear_activation", "residual_norm"} <= kinds
    assert len(together(fused)) >= 8


async def measure(cluster: Cluster, pnodes: int, fuse: bool, micro_batches: int) -> list[float]:
    """The losses of one run, in which that many PNodes took part."""
    session = f"s-{pnodes}-{'fused' if fuse else 'plain'}-{micro_batches}"
    options: dict[str, Any] = {"steps": STEPS, "batch": BATCH, "seed": SEED, "hyper": HYPER, "micro_batches": micro_batches}
    rows = await train(cluster.url, session, network="invisible", pnodes=pnodes, fuse=fuse, **options)
    parts = (await manifest(cluster.data_dir, session)).parts
    assert len({part.key for part in parts}) == pnodes, parts
    return losses(rows)


async def test_losses_are_bit_equal_on_every_placement_and_close_otherwise(cluster: Cluster) -> None:
    """20 steps on 1, 2, 3 and 8 PNodes, fused and not, with 1, 2 and 4 micro-batches: 24 runs."""
    await register(cluster.url, NETWORK)
    alone: dict[tuple[bool, int], list[float]] = {}
    for fuse in (True, False):
        for micro_batches in (1, 2, 4):
            first, *others = [await measure(cluster, pnodes, fuse, micro_batches) for pnodes in PLACEMENTS]
            assert [other == first for other in others] == [True] * len(others), (fuse, micro_batches)
            alone[fuse, micro_batches] = first
    assert alone[True, 1][-1] < alone[True, 1][0]
    for found in alone.values():
        assert len(found) == STEPS
        assert found == pytest.approx(alone[True, 1], rel=RELATIVE)


async def test_the_command_gives_what_the_api_gives(cluster: Cluster, tmp_path: Path) -> None:
    """`dcnr train` on three PNodes prints the losses of a run through the API on four, to the last bit."""
    (tmp_path / "network.yml").write_text(NETWORK)
    settings = [f"--set={key}={value}" for key, value in HYPER.items()]
    run = ["--steps", str(STEPS), "--batch", str(BATCH), "--micro-batches", "2", "--seed", str(SEED), "--session", "command"]
    out = cluster.dcnr("train", str(tmp_path / "network.yml"), "--dataset", "text", *run, *settings, "--pnodes", "3", "--json")
    *steps, done = map(json.loads, out.splitlines())
    assert done["final_loss"] == steps[-1]["loss"]
    assert [step["loss"] for step in steps] == await measure(cluster, 4, fuse=True, micro_batches=2)
