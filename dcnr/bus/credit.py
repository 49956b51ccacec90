"""How much may be under way, and what has arrived before.

- One flow has up to 4 MiB unacknowledged; all flows into one receiver together 32 MiB, unless there are more than 16 of them.
- The receiver acknowledges every 1 MiB.
- Transfers are sent again until they are acknowledged, so the receiver remembers those that it has.
"""

from __future__ import annotations

from collections import deque

from dcnr.bus.messages import Hop
from dcnr.ids import PNodeId

FLOW_WINDOW = 4 << 20
RECEIVER_WINDOW = 32 << 20
MIN_WINDOW = 2 << 20
"""Twice what the receiver takes before it acknowledges."""
ACK_EVERY = 1 << 20
REMEMBERED = 1024
"""Transfers per sender; far more than a window holds."""
SENDERS = 1024
"""Those of which something is remembered: the ones that sent last."""

Key = tuple[PNodeId, int]
"""Sender and its number of a transfer."""


def key(hop: Hop) -> Key:
    """The transfer of a hop."""
    return hop.sender, hop.transfer


def window(peers: int) -> int:
    """Bytes that one flow may have under way when a receiver has `peers` peers."""
    return max(MIN_WINDOW, min(FLOW_WINDOW, RECEIVER_WINDOW // max(1, peers)))


class Seen:
    """The last transfers of each sender."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._order: dict[PNodeId, deque[int]] = {}
        self._known: set[Key] = set()

    def __contains__(self, transfer: Key) -> bool:
        return transfer in self._known

    def add(self, transfer: Key) -> bool:
        """Remember; False if it was there already."""
        if transfer in self._known:
            return False
        sender, number = transfer
        order = self._order.pop(sender, None)
        if order is None:
            order = deque()
            if len(self._order) == SENDERS:
                oldest = next(iter(self._order))
                self._known.difference_update((oldest, other) for other in self._order.pop(oldest))
        self._order[sender] = order
        if len(order) == self._remembered:
            self._known.discard((sender, order.popleft()))
        order.append(number)
        self._known.add(transfer)
        return True
