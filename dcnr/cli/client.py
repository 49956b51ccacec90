"""How a command runs on the loop, and how it asks the orchestrator.

Ctrl-C (and SIGTERM) cancels the command, which then has `GRACE` seconds to put things in order; a second one ends the process at once.
Children of the process need no care in that case: the guard ends them (cli/guard).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from dcnr.bus.api import call
from dcnr.bus.base import Bus
from dcnr.config import from_environment
from dcnr.signals import leave, on_interrupt

T = TypeVar("T")

GRACE = 2.8
"""Seconds from Ctrl-C to the end, whatever happens."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine. Ctrl-C cancels it and ends the program with code 130, without a second lost on taking Python down."""
    try:
        return asyncio.run(_interruptible(work))
    except asyncio.CancelledError:
        leave()


async def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.current_task()
    assert task is not None
    on_interrupt(task.cancel, GRACE)
    return await work


@asynccontextmanager
async def connection(url: str | None = None) -> AsyncIterator[Bus]:
    """A bus, by default at `NATS_URL`, closed at the end."""
    from dcnr.bus.nats import connect  # half a second: only for those who connect

    bus = await connect(from_environment(nats_url=url).nats_url, "dcnr")
    try:
        yield bus
    finally:
        await bus.close()


def ask(verb: str, **fields: object) -> dict[str, Any]:
    """One question to the orchestrator: connect, ask, disconnect."""

    async def work() -> dict[str, Any]:
        async with connection() as bus:
            return await call(bus, verb, **fields)

    return run(work())
