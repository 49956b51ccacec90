"""Time as an object, so that machines and tests never read the wall clock themselves."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that only grow."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        ...


class MonotonicClock:
    """The computer's own clock."""

    def now(self) -> float:
        """Seconds since some fixed moment; unaffected by changes of the wall clock."""
        return time.monotonic()


class ManualClock:
    """A clock that tests move by hand."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """The time that was last set."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self._now += seconds
