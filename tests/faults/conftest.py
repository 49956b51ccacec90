"""One cluster for the folder, whole again before each test, and what the session of these tests gives when nothing disturbs it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.faults.cluster import Cluster, Tensors, cluster
from tests.faults.running import EVERY, STEPS

AGENTS, ENOUGH = 4, 3
"""A test needs two and a spare one; who was killed by the last test may still be starting."""


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Four agents, one orchestrator; tests use `whole`."""
    async with cluster(tmp_path_factory.mktemp("faults"), AGENTS) as one:
        yield one


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def undisturbed(shared: Cluster) -> Tensors:
    """The last checkpoint of the session that nothing happens to."""
    one = await shared.session("undisturbed", STEPS, EVERY)
    await one.until_state("done")
    return await one.tensors(STEPS)


@pytest_asyncio.fixture(loop_scope="package")
async def whole(shared: Cluster, undisturbed: Tensors) -> AsyncIterator[Cluster]:
    """The cluster, with everything running and no session under way."""
    await shared.mend(ENOUGH)
    yield shared
    shared.proxy.tap = None
    shared.start_missing()
