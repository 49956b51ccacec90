"""How fast tensors went to each peer, as a person wants to know it: a moving average over those that were large enough to tell."""

from __future__ import annotations

from dcnr.ids import PNodeId

TOLD_FROM = 256 << 10
"""Bytes; of smaller tensors the way of the message is what is measured."""
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
