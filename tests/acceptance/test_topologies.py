"""The two production topologies, as they are shipped, train across three agents, fused and not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.acceptance.running import Cluster, listening, losses, manifest, register
from tests.network.files import NETWORKS
from tests.tolerances import assert_close

pytestmark = [pytest.mark.nats, pytest.mark.timeout(150)]

AGENTS = 3


@pytest.mark.parametrize(
    ("topology", "vnodes", "options"),
    [("topology_1", 143, {"batch": 2, "steps": 2}), ("topology_2", 183, {"batch": 1, "steps": 1})],
    ids=["topology_1", "topology_2"],
)
async def test_a_production_topology_trains_on_three_agents(cluster: Cluster, topology: str, vnodes: int, options: dict[str, Any]) -> None:
    """It has the promised number of VNodes; losses with and without fusion are within the tolerance of its float16."""
    file = NETWORKS / f"{topology}.yml"
    found = json.loads(cluster.dcnr("network", "analyze", str(file), "--json"))
    assert found["vnodes"] == vnodes
    await register(cluster.url, file.read_text())
    fused, plain = [await measure(cluster, found["name"], fuse, **options) for fuse in (True, False)]
    assert_close(fused, plain, "float16", f"losses of {topology}")


async def measure(cluster: Cluster, network: str, fuse: bool, **options: Any) -> list[float]:
    """The losses of a run on three agents, of which nothing stays: its checkpoints are large."""
    session = f"{network}-{'fused' if fuse else 'plain'}"
    async with listening(cluster.url, session) as run:
        await run.ask("create", network=network, dataset="text", pnodes=AGENTS, fuse=fuse, **options)
        await run.until("done")
        assert len((await manifest(cluster.data_dir, session)).parts) == AGENTS
        await run.ask("delete")
    assert not any(row.skipped for row in run.rows)
    return losses(run.rows)
