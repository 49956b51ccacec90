"""Whatever is killed while a text is generated, the text is the one that it would have been."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dcnr.client.generation import generate
from tests.faults.cluster import Cluster, Tensors

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="package")]

WANTED: dict[str, Any] = {"session": "undisturbed", "prompt": "line 7", "temperature": 1.0, "seed": 5, "max_tokens": 250}


async def answer(cluster: Cluster, kill: Any = None, **fields: Any) -> str:
    """The whole text; after its first piece `kill` gets the name of an agent that serves it."""
    text = ""
    async with asyncio.timeout(90):
        async for piece in generate(cluster.bus, {**WANTED, **fields}):
            text += piece.text
            if kill is not None and text:
                hosts = [
                    name for name in cluster.agents if any(one.session.startswith("reading-") for one in cluster.beats[name][1].hosted)
                ]
                if hosts:
                    await kill(hosts[0])
                    kill = None
    assert kill is None, "it was over before anybody was killed"
    return text


@pytest.mark.parametrize("pnodes", [1, 2])
async def test_a_killed_agent_changes_no_text(whole: Cluster, undisturbed: Tensors, pnodes: int) -> None:
    """SIGKILL in the middle; what it had kept is read anew where it fits."""
    assert undisturbed

    async def kill(host: str) -> None:
        whole.processes.kill(host)

    wanted = await answer(whole, pnodes=pnodes)
    assert await answer(whole, kill, pnodes=pnodes) == wanted


async def test_a_killed_orchestrator_changes_no_text(whole: Cluster, undisturbed: Tensors) -> None:
    """The next one is asked for all of it again, and nothing is shown twice."""
    assert undisturbed

    async def kill(_host: str) -> None:
        whole.processes.kill("orchestrator-1")
        whole.start_orchestrator("orchestrator-2")

    wanted = await answer(whole)
    assert await answer(whole, kill) == wanted
