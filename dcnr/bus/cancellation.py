"""nats-py and `asyncio.wait_for` may swallow the cancellation of a task that they wait in: whoever cancelled it then waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heeded() -> Iterator[None]:
    """Raises `CancelledError` at the end of a block in which the task was cancelled, whatever became of that inside."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError
