"""How a command runs on the loop, and how it asks the cluster.

Ctrl-C (and SIGTERM) cancels the command, which then has `GRACE` seconds to put things in order; a second one ends the process at once.
Children of the process need no care in that case: the guard ends them (cli/guard).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from dcnr import log
from dcnr.cli.output import OnProgress, in_thread
from dcnr.client.cluster import Cluster
from dcnr.client.connect import connect
from dcnr.client.session import Session
from dcnr.errors import UserError
from dcnr.ids import SessionId, check_id
from dcnr.signals import leave, on_interrupt

T = TypeVar("T")

GRACE = 2.8
"""Seconds from Ctrl-C to the end, whatever happens."""
STEP_DIGITS = 16
"""Of the largest step."""
TIDY_UP = 1.0
"""Seconds of these for work in a thread to stop by itself."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine. Ctrl-C cancels it and ends the program with code 130, without a second lost on taking Python down."""
    log.configure(level="warning")  # what the bus says of its connection goes to stderr, never between results
    try:
        return asyncio.run(_interruptible(work))
    except asyncio.CancelledError:
        leave()


async def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.current_task()
    assert task is not None
    on_interrupt(task.cancel, GRACE)
    return await work


class Stopped(Exception):
    """Work in a thread was cancelled."""


async def beside_loop(work: Callable[[OnProgress], T], show: OnProgress = lambda done, total: None) -> T:
    """The result of `work`, done in a thread, whose progress goes to `show`.

    Cancelled, the next progress of `work` raises `Stopped` inside it; it has `TIDY_UP` seconds to get there, or is left behind.
    """
    stopped = threading.Event()

    def on_progress(done: int, total: int) -> None:
        if stopped.is_set():
            raise Stopped
        show(done, total)

    working = asyncio.wrap_future(in_thread(partial(work, on_progress)))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        stopped.set()
        for ended in (await asyncio.wait({working}, timeout=TIDY_UP))[0]:
            ended.exception()  # looked at, and of no interest any more
        raise


def ask(question: Callable[[Cluster], Awaitable[T]]) -> T:
    """One question to the cluster: connect, ask, disconnect."""

    async def work() -> T:
        async with connect() as cluster:
            return await question(cluster)

    return run(work())


def ask_session(name: str, question: Callable[[Session], Awaitable[T]]) -> T:
    """One question about a session."""

    async def work(cluster: Cluster) -> T:
        return await question(await cluster.session(name))

    return ask(work)


def session_and_step(source: str) -> tuple[SessionId, int | None]:
    """What `SESSION[@STEP]` means; without a step the newest checkpoint."""
    name, at, step = source.partition("@")
    if at and not (step.isascii() and step.isdecimal() and len(step) <= STEP_DIGITS):
        raise UserError(f"'{source}' is no checkpoint: '{step}' is not a step", f"use {name}@400, or {name} for the newest")
    return SessionId(check_id(name, "session")), int(step) if at else None
