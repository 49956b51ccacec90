"""Counters."""

from __future__ import annotations

from dcnr.agents.telemetry import IN_PLACE, Telemetry


def test_counters_add_up() -> None:
    """Drops by reason, bytes by lane and by destination."""
    telemetry = Telemetry()
    telemetry.drop("stale")
    telemetry.drop("stale", 2)
    telemetry.receive(IN_PLACE, 10)
    telemetry.receive("shm", 5)
    telemetry.send("b", 7)
    assert telemetry.dropped == {"stale": 3}
    assert telemetry.received == {IN_PLACE: 10, "shm": 5}
    assert telemetry.sent == {"b": 7}
