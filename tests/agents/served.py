"""One agent on a memory bus, and a trainer that it serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from dcnr.agents.shell import Shell
from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import Deploy, Failed, Refused
from tests.agents.tiny import A, deploy_of, graph_of
from tests.integration.scripted import PATIENCE, Trainer, agents, info_of

DEPLOY = deploy_of(dict.fromkeys(graph_of().by_id, A), batch=4, micro_batches=2)

M = TypeVar("M", Failed, Refused)


@asynccontextmanager
async def cluster(deploy: Deploy, memory: int = 1 << 30) -> AsyncIterator[tuple[Shell, Trainer, MemoryBroker]]:
    """One agent `a`, and a trainer."""
    broker, infos = MemoryBroker(), [info_of("a", memory)]
    trainer = await Trainer.join(broker, graph_of(), deploy, infos)
    try:
        async with agents(broker, NumpyBackend(), infos) as shells:
            yield shells[A], trainer, broker
    finally:
        await trainer.leave()


async def heard(trainer: Trainer, kind: type[M]) -> M:
    """Wait for a failure or refusal."""
    async with asyncio.timeout(PATIENCE):
        while True:
            for message in trainer.heard:
                if isinstance(message, kind):
                    return message
            trainer.changed.clear()
            await trainer.changed.wait()
