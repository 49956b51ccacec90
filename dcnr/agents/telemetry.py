"""What a PNode counts: tensors that it dropped and why, bytes that moved and on which lane, bytes that each VNode holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from dcnr.ids import NodeId

Reason = Literal["stale", "duplicate", "unknown", "malformed"]
"""stale: of an older epoch, attempt or step. unknown: of a session or slot that is not here. malformed: of a wrong shape."""

IN_PLACE = "in place"
"""The lane between segments of one PNode."""


@dataclass(slots=True)
class Telemetry:
    """Counters of one process, since it began."""

    dropped: Counter[Reason] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    """Bytes by lane, also in place."""
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes by destination."""
    vnodes: dict[NodeId, int] = field(default_factory=dict)
    """Bytes of each hosted VNode: parameters, optimizer state and activations in flight."""

    def drop(self, reason: Reason, count: int = 1) -> None:
        """Something came that has no effect."""
        self.dropped[reason] += count

    def receive(self, lane: str, nbytes: int) -> None:
        """A tensor came."""
        self.received[lane] += nbytes

    def send(self, to: str, nbytes: int) -> None:
        """A tensor was sent."""
        self.sent[to] += nbytes
