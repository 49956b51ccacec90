"""Shared segments of one tensor each, which the receiver uses where they lie: one copy, at the sender, and none at the receiver.

- A segment begins with a page of control: the number of the transfer that it holds. The sender writes it when it lends the segment; the
  receiver writes `NOBODY` when the last array over it is gone. Neither needs a message for that, so none can get lost.
- What a receiver may hold is bounded: activations stay with it until their gradient comes, and lending must not wait for them. With
  nothing left to lend, a tensor goes through the ring, from which the receiver copies.
- A segment whose fate is unknown (nobody acknowledged it) is never lent again.
- Segments are kept as long as there is room, since fresh pages cost more than the copy.
"""

from __future__ import annotations

import mmap
import struct
import weakref

import numpy as np

from dcnr.bus.lanes.base import Bytes
from dcnr.bus.lanes.segment import Segment
from dcnr.errors import PeerError

CONTROL = mmap.PAGESIZE
"""Bytes before the tensor."""
LEND_FROM = 1 << 20
"""Smaller tensors are not worth a segment."""
LIMIT = 512 << 20
"""Bytes that one receiver may hold."""
SPARE = 8
"""No segment is made for lending that takes more than this part (1 / 8) of the free shared memory: rings go first."""
NOBODY = 0
_GRAIN = 1 << 20
_WASTE = 2
"""A segment may be this many times as large as what it holds."""
_NUMBER = struct.Struct("<q")


def size_for(nbytes: int) -> int:
    """Bytes of a segment for a tensor of `nbytes`."""
    return -(-(nbytes + CONTROL) // _GRAIN) * _GRAIN


class Shelf:
    """The segments that are for one receiver."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._segments: list[Segment] = []

    def __len__(self) -> int:
        return len(self._segments)

    def find(self, nbytes: int) -> Segment | None:
        """One that nobody uses and that fits, the one lent last if there are several: its pages may be in the cache."""
        size = size_for(nbytes)
        for at in reversed(range(len(self._segments))):
            found = self._segments[at]
            if size <= len(found.memory) <= _WASTE * size and _is_free(found):
                self._segments.append(self._segments.pop(at))
                return found
        return None

    def has_room(self, nbytes: int) -> bool:
        """Whether one more may be made for `nbytes`, after letting go of free ones that do not fit."""
        size = size_for(nbytes)
        for segment in [one for one in self._segments if _is_free(one)]:
            if self._held() + size > self._limit:
                self.discard(segment)
        return self._held() + size <= self._limit

    def add(self, segment: Segment) -> None:
        """A new one."""
        self._segments.append(segment)

    def discard(self, segment: Segment) -> None:
        """Never use it again; a receiver that has it keeps it."""
        if segment in self._segments:
            self._segments.remove(segment)
            segment.close()

    def close(self) -> None:
        """Discard all."""
        while self._segments:
            self._segments.pop().close()

    def _held(self) -> int:
        return sum(len(segment.memory) for segment in self._segments)


def lend(segment: Segment, transfer: int, data: Bytes) -> None:
    """Put a tensor into a free segment."""
    np.frombuffer(segment.memory, np.uint8, len(data), CONTROL)[:] = data
    _NUMBER.pack_into(segment.memory, 0, transfer)


def borrow(segment: Segment, transfer: int, nbytes: int) -> Bytes:
    """The tensor in a segment of another process, read-only. The segment goes back by itself when the array and all views of it are gone.

    Raises `PeerError` if the segment holds something else.
    """
    control = segment.control
    if control is None or not 0 < nbytes <= len(segment.memory) - CONTROL:
        raise PeerError(f"hop: no {nbytes} bytes in a segment of {len(segment.memory)}")
    if _NUMBER.unpack_from(control)[0] != transfer:
        raise PeerError("hop: its shared memory holds another tensor by now")
    data = np.frombuffer(segment.memory, np.uint8, nbytes, CONTROL)
    weakref.finalize(data, _NUMBER.pack_into, control, 0, NOBODY).atexit = False
    return data


def _is_free(segment: Segment) -> bool:
    return bool(_NUMBER.unpack_from(segment.memory)[0] == NOBODY)
