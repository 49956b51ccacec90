"""An agent that a test can make go wrong: `python -m tests.faults.saboteur FOLDER <options of dcnr-agent>`.

What is to go wrong is a file in FOLDER, which is taken away when it does: `raise` makes the next operation of a node (a product or a
look-up) raise, `compute` makes it take as many seconds as the file says, `loop` blocks the event loop for so long at the next order.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dcnr.agents.main import main
from dcnr.agents.shell import Service
from dcnr.backends.cpu.backend import CpuBackend

Operation = Callable[..., Any]
_hear = Service._hear


class Sabotage(Exception):
    """What `raise` raises."""


def order(folder: Path, name: str) -> str | None:
    """What the file says, once."""
    taken = folder / f"{name}.{threading.get_ident()}"
    try:
        (folder / name).rename(taken)  # of several threads one gets it
    except FileNotFoundError:
        return None
    return taken.read_text()


def install(folder: Path) -> None:
    """Put it in the way of the agent."""

    def disturbed(operation: Operation) -> Operation:
        def disturb(*arguments: Any, **options: Any) -> Any:
            if order(folder, "raise") is not None:
                raise Sabotage("something in a node")
            if (seconds := order(folder, "compute")) is not None:
                time.sleep(float(seconds))
            return operation(*arguments, **options)

        return disturb

    def hear(self: Service, data: bytes) -> None:
        if (seconds := order(folder, "loop")) is not None:
            time.sleep(float(seconds))
        _hear(self, data)

    for name in ("linear", "embedding"):
        setattr(CpuBackend, name, disturbed(getattr(CpuBackend, name)))
    Service._hear = hear  # type: ignore[method-assign]


if __name__ == "__main__":
    install(Path(sys.argv[1]))
    main(sys.argv[2:], prog_name="dcnr-agent")
