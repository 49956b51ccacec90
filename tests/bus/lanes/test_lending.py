"""Segments are lent to one user at a time, and what is kept for lending is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dcnr.bus.lanes import lending, segment
from dcnr.bus.lanes.lending import CONTROL, Shelf, borrow, lend, size_for
from dcnr.bus.lanes.segment import Segment
from dcnr.errors import PeerError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Tests do not touch segments of running clusters."""
    monkeypatch.setattr(segment, "directory", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    """Room for four segments of 1 MiB."""
    made = Shelf(4 * MIB)
    yield made
    made.close()


def stocked(shelf: Shelf, *sizes: int) -> list[Segment]:
    """Free segments of these sizes."""
    made = [segment.create(size) for size in sizes]
    for one in made:
        shelf.add(one)
    return made


def test_a_lent_segment_is_not_found_until_the_array_over_it_is_gone(shelf: Shelf) -> None:
    """Views of views count."""
    (ours,) = stocked(shelf, MIB)
    data = np.arange(100, dtype=np.uint8)
    lend(ours, 7, data)
    assert shelf.find(100) is None
    array = borrow(segment.attach(ours.name, CONTROL), 7, 100)
    assert array.tobytes() == data.tobytes()
    view = array[10:].view(np.int8)[::2]
    del array
    assert shelf.find(100) is None
    del view
    assert shelf.find(100) is ours


def test_a_segment_that_holds_another_transfer_or_is_too_short_gives_nothing(shelf: Shelf) -> None:
    """A late header, or one that lies."""
    (ours,) = stocked(shelf, MIB)
    lend(ours, 7, np.zeros(100, np.uint8))
    theirs = segment.attach(ours.name, CONTROL)
    for transfer, nbytes in ((6, 100), (7, MIB), (7, 0), (7, -1)):
        with pytest.raises(PeerError, match="hop: "):
            borrow(theirs, transfer, nbytes)
    with pytest.raises(PeerError, match="hop: no 100 bytes"):
        borrow(segment.attach(ours.name), 7, 100)
    assert shelf.find(100) is None


def test_the_best_choice_is_the_one_lent_last_if_it_is_not_far_too_large(shelf: Shelf) -> None:
    """Its pages may be in the cache."""
    first, second, large = stocked(shelf, MIB, MIB, 3 * MIB)
    assert shelf.find(100) is second
    lend(second, 1, np.zeros(1, np.uint8))
    assert shelf.find(100) is first
    lend(first, 2, np.zeros(1, np.uint8))
    assert shelf.find(100) is None
    assert shelf.find(2 * MIB) is large


def test_room_is_made_by_letting_go_of_free_segments_only(shelf: Shelf, own_directory: Path) -> None:
    """Oldest first, as many as are needed."""
    first, *_ = stocked(shelf, MIB, MIB, MIB)
    lend(first, 1, np.zeros(1, np.uint8))
    assert shelf.has_room(100)
    assert len(shelf) == 3
    assert shelf.has_room(2 * MIB)
    assert len(shelf) == 1
    assert not shelf.has_room(4 * MIB)
    assert [path.name for path in own_directory.iterdir()] == [first.name]


def test_sizes_are_rounded_so_that_segments_can_be_used_again() -> None:
    """With the page of control."""
    assert size_for(1) == MIB
    assert size_for(MIB - CONTROL) == MIB
    assert size_for(MIB) == 2 * MIB
    assert lending.LEND_FROM <= lending.LIMIT
