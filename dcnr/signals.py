"""How a process ends when it is asked to: in order the first time, at once the second, and never later than promised."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED = 130
"""Exit code of a process that was interrupted, as shells count it."""


def on_interrupt(stop: Callable[[], object], grace: float) -> None:
    """Call `stop` at the first SIGINT or SIGTERM; `grace` seconds later, or at a second one, the process ends. Needs the running loop."""
    stopping = False

    def handle() -> None:
        nonlocal stopping
        if stopping:
            leave()
        stopping = True
        last_resort = threading.Timer(grace, leave)
        last_resort.daemon = True
        last_resort.start()
        stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle)


def leave() -> NoReturn:
    """End the process at once, without a second lost on taking Python down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)
