"""The border of one VNode in training: which tensors it takes, and which micro-batch is next.

Rule 1: a step that was decided here is over; whatever still comes for it is stale.
Rule 2: a hop of a later step waits: step N + 1 begins only when step N was decided here.
Rule 3: micro-batches run in index order, forwards and backwards each, so sums never depend on the order of arrival.
Rule 4: what comes twice is taken once.
Rule 5: a step that is begun again is as if nothing had come for it yet; what waits for later steps stays.
"""

from __future__ import annotations

from collections import defaultdict
from enum import Enum, auto
from typing import NamedTuple

from dcnr.errors import InvariantError


class Turn(NamedTuple):
    """One micro-batch of one step."""

    step: int
    micro: int


class Offer(Enum):
    """What became of a tensor that was offered."""

    TAKEN = auto()
    STALE = auto()
    DUPLICATE = auto()


class VNode:
    """`inputs` and `gradients` count what comes from outside its segment for one micro-batch."""

    def __init__(self, inputs: int, gradients: int, micro_batches: int, step: int) -> None:
        self._needed = {"fwd": inputs, "bwd": gradients}
        self._micro_batches = micro_batches
        self._next = {"fwd": Turn(step + 1, 0), "bwd": Turn(step + 1, 0)}
        self._arrived: dict[tuple[str, Turn], set[int]] = defaultdict(set)
        self.decided = step
        """The last step that was decided here."""

    def offer(self, phase: str, turn: Turn, index: int) -> Offer:
        """Take input (or gradient) `index` for `turn`, unless it is too late for it or it is here already."""
        late = turn.step <= self.decided or turn < self._next[phase]
        if late or not 0 <= turn.micro < self._micro_batches:
            return Offer.STALE
        arrived = self._arrived[phase, turn]
        if index in arrived:
            return Offer.DUPLICATE
        arrived.add(index)
        return Offer.TAKEN

    def next(self, phase: str) -> Turn:
        """The turn that must run next."""
        return self._next[phase]

    def ready(self, phase: str) -> bool:
        """Whether the next turn may run: its step's predecessor was decided, and everything for it is here."""
        turn = self._next[phase]
        if turn.step != self.decided + 1 or turn.micro == self._micro_batches:
            return False
        return len(self._arrived.get((phase, turn), ())) == self._needed[phase] and (phase == "fwd" or turn < self._next["fwd"])

    def run(self, phase: str) -> None:
        """The next turn was given to the compute thread."""
        turn = self._next[phase]
        self._arrived.pop((phase, turn), None)
        self._next[phase] = Turn(turn.step, turn.micro + 1)

    def decide(self, step: int) -> None:
        """Step `step` is over, whatever was decided."""
        self.decided = step
        self._next = {phase: Turn(step + 1, 0) for phase in self._next}
        self._arrived = defaultdict(set, {key: slots for key, slots in self._arrived.items() if key[1].step > step})

    def renew(self, step: int) -> None:
        """Step `step` is begun again: nothing of it is here. One that was decided is over."""
        self._arrived = defaultdict(set, {key: slots for key, slots in self._arrived.items() if key[1].step != step})
        if step == self.decided + 1:
            self._next = {phase: Turn(step, 0) for phase in self._next}

    def validate(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        if any(turn.step <= self.decided for _, turn in self._arrived):
            raise InvariantError("a tensor of a decided step is still kept")
        if self._next["bwd"] > self._next["fwd"]:
            raise InvariantError("a backward ran before its forward")
