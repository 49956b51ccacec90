"""Slots of a ring never overlap, and room that was given back is found again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dcnr.bus.lanes.ring import Ring


def test_slots_follow_each_other_and_go_round() -> None:
    """1. fill; 2. full; 3. the oldest goes; 4. its room is used."""
    ring = Ring(256)
    assert [ring.reserve(64), ring.reserve(65), ring.reserve(1)] == [0, 64, 192]
    assert ring.reserve(1) is None
    ring.release(0)
    assert ring.reserve(65) is None
    assert ring.reserve(64) == 0
    ring.release(192)
    assert ring.reserve(1) is None, "the slot before it is still held"
    ring.release(64)
    assert ring.reserve(192) == 64


def test_an_idle_ring_takes_its_whole_size_and_not_more() -> None:
    """Whatever happened before."""
    ring = Ring(256)
    ring.release(ring.reserve(100) or 0)
    assert ring.reserve(257) is None
    assert ring.reserve(256) == 0
    assert len(ring) == 1


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=120))
def test_slots_never_overlap(actions: list[tuple[bool, int]]) -> None:
    """For any order of taking and giving back; and an idle ring forgets everything."""
    ring, held = Ring(1024), dict[int, int]()
    for take, number in actions:
        if take:
            start = ring.reserve(number)
            if start is not None:
                assert start % 64 == 0
                assert start + number <= 1024
                assert all(start >= other + size or start + number <= other for other, size in held.items())
                held[start] = number
        elif held:
            start = sorted(held)[number % len(held)]
            ring.release(start)
            del held[start]
    for start in held:
        ring.release(start)
    assert len(ring) == 0
