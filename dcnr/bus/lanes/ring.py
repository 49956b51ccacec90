"""Room in a ring of bytes, handed out in order and given back in any order. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True)
class _Slot:
    start: int
    end: int
    free: bool = False


class Ring:
    """`size` bytes; a slot is contiguous, and starts at a multiple of `alignment`."""

    def __init__(self, size: int, alignment: int = 64) -> None:
        self.size = size
        self._alignment = alignment
        self._slots: deque[_Slot] = deque()

    def __len__(self) -> int:
        """Slots that block room; 0 when the ring is idle."""
        return len(self._slots)

    def reserve(self, nbytes: int) -> int | None:
        """Where `nbytes` bytes may lie; None while there is no room."""
        need = -(-nbytes // self._alignment) * self._alignment
        start = self._start(need)
        if start is not None:
            self._slots.append(_Slot(start, start + need))
        return start

    def release(self, start: int) -> None:
        """The slot at `start` is not needed any more."""
        for slot in self._slots:
            if slot.start == start and not slot.free:
                slot.free = True
                break
        while self._slots and self._slots[0].free:
            self._slots.popleft()

    def _start(self, need: int) -> int | None:
        if not self._slots:
            return 0 if need <= self.size else None
        first, last = self._slots[0].start, self._slots[-1].end
        if last <= first:  # it has gone round: room lies between the newest and the oldest
            return last if need <= first - last else None
        if need <= self.size - last:
            return last
        return 0 if need <= first else None
