"""How fast a peer is: as a person wants to know it, and as it decides how long to wait for a sign of it.

- `Pace`: a moving average over the tensors that were large enough to tell.
- `Patience`: what has got no answer is sent again after a few times as long as answers took so far, then ever more rarely; after a
  multiple of that without any sign it has failed. So no time is a setting: a slow link is given more, a quick peer less.
"""

from __future__ import annotations

from dcnr.ids import PNodeId

TOLD_FROM = 256 << 10
"""Bytes; of smaller tensors the way of the message is what is measured."""
PATIENCE = 2.0
"""Seconds to wait for a sign of a peer of which nothing is known yet."""
TRIES = 8
"""So many pauses without a sign, none of them counted as shorter than the first, and a transfer has failed."""
_QUICK = 4
"""However quick a peer is, a pause is not shorter than this part (1 / 4) of the first."""
_DOUBLINGS = 16
"""More than any bound allows, and no overflow."""
_SLACK = 4
"""A pause is so many times as long as an answer took: the peer may just have something else to do."""
LONGEST = 15.0
"""Seconds of the longest pause: a receiver lets go of what it hears nothing of for some of these (`chunks.ABANDONED_AFTER`)."""
_WEIGHT = 0.2
"""Of the newest."""


class Pace:
    """Bytes per second by peer and lane."""

    def __init__(self) -> None:
        self._rates: dict[tuple[PNodeId, str], float] = {}

    def note(self, peer: PNodeId, lane: str, nbytes: int, seconds: float) -> None:
        """A tensor took `seconds` from its turn to its arrival."""
        if nbytes < TOLD_FROM or seconds <= 0:
            return
        rate = nbytes / seconds
        before = self._rates.get((peer, lane), rate)
        self._rates[peer, lane] = before + _WEIGHT * (rate - before)

    def rate(self, peer: PNodeId, lane: str) -> float:
        """Bytes per second; 0 as long as nothing is known."""
        return self._rates.get((peer, lane), 0.0)

    def forget(self, peer: PNodeId) -> None:
        """It takes no part any more."""
        self._rates = {known: rate for known, rate in self._rates.items() if known[0] != peer}


class Patience:
    """How long to wait for one peer. `first`: the pause as long as nothing is known of it."""

    def __init__(self, first: float = PATIENCE, tries: int = TRIES) -> None:
        self._first = first
        self._tries = tries
        self._trip = 0.0

    def note(self, seconds: float) -> None:
        """An answer came, `seconds` after what was sent only once. Slowness is believed at once, quickness by and by."""
        self._trip = seconds if seconds > self._trip else self._trip + _WEIGHT * (seconds - self._trip)

    def pause(self, again: int) -> float:
        """Seconds until something is sent again, when it has been sent again `again` times: twice as long each time, within bounds."""
        return min(self._once() * 2.0 ** min(again, _DOUBLINGS), self.limit / 2, max(LONGEST, self._first))

    @property
    def limit(self) -> float:
        """Seconds without any sign after which a transfer has failed."""
        return self._tries * max(self._first, self._once())

    def _once(self) -> float:
        return max(self._first / _QUICK, _SLACK * self._trip) if self._trip else self._first
