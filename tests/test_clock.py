"""Clocks only go forward, and a manual one only when it is told."""

from __future__ import annotations

from dcnr.clock import ManualClock, MonotonicClock


def test_a_manual_clock_moves_by_hand() -> None:
    """It stands still between two advances."""
    clock = ManualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.advance(1.5)
    assert clock.now() == 6.5


def test_the_real_clock_never_goes_back() -> None:
    """Each reading is at least the one before."""
    clock = MonotonicClock()
    readings = [clock.now() for _ in range(100)]
    assert readings == sorted(readings)
