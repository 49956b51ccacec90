"""Virtual time: a queue of (time, action) that one loop works off.

Rule 1: nothing waits and nothing runs at the same time; whoever wants something to happen later says when.
Rule 2: of actions at one time the one that was asked for first comes first, so that a run repeats exactly.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class Scheduler:
    """The one clock of a simulated world, and all that is still to happen in it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done = 0
        """Actions so far."""
        self._queue: list[tuple[float, int, Action]] = []
        self._order = count()

    def at(self, when: float, action: Action) -> None:
        """Do `action` at `when`, or right after the present one if that is past."""
        heapq.heappush(self._queue, (max(when, self.now), next(self._order), action))

    def after(self, delay: float, action: Action) -> None:
        """Do `action` when `delay` seconds have passed."""
        self.at(self.now + delay, action)

    def run(self, until: float, enough: Callable[[], bool]) -> bool:
        """Work off the queue up to time `until`; True as soon as `enough()` holds after an action."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self._queue)
            self.done += 1
            action()
            if enough():
                return True
        self.now = max(self.now, until)
        return False
