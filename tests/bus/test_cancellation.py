"""A cancellation that a library swallows still ends the task."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from dcnr.bus.cancellation import heeded


async def test_a_cancellation_that_was_swallowed_inside_is_raised_at_the_end_of_the_block() -> None:
    """As nats-py does in its `publish`."""

    async def swallows() -> str:
        with heeded(), suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "went on"

    task = asyncio.create_task(swallows())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_without_a_cancellation_results_and_errors_pass() -> None:
    """Also in a task that was cancelled earlier, and has got over it."""

    async def recovers() -> str:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        with pytest.raises(ValueError, match="mine"), heeded():
            raise ValueError("mine")
        with heeded():
            return "done"

    task = asyncio.create_task(recovers())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "done"
