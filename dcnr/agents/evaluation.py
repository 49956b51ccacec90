"""A validation on one PNode: collects what its forward-only passes need, and says which of them may run next.

Rule 1: passes run only while the step whose state is validated is the last that was decided here. What comes earlier waits for that; what
comes for an older step is stale.
Rule 2: of several attempts the newest counts: with its first tensor everything begins anew.
Rule 3: the lowest micro-batch goes first, then the first segment; each pass is given out once.
Rule 4: training knows nothing of it: it has no part in turns, attempts, reports or gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from dcnr.agents.routing import Local, SegmentRoutes
from dcnr.agents.vnode import Offer
from dcnr.backends.base import Array
from dcnr.errors import InvariantError


class Validated(NamedTuple):
    """One micro-batch of one attempt to validate the state after a step."""

    step: int
    attempt: int
    micro: int


class Inputs(NamedTuple):
    """What a pass needs: tensors, and their weights, in the order of the segment's external inputs."""

    of: Validated
    segment: int
    tensors: tuple[Array, ...]
    weights: tuple[float, ...]


class Evaluation:
    """Of one session, whose segments here are `segments`."""

    def __init__(self, segments: Sequence[SegmentRoutes]) -> None:
        self._needed = {routes.index: len(routes.inputs) for routes in segments}
        self._at = (-1, 0)
        """Step and attempt."""
        self._arrived: dict[tuple[int, int], dict[int, tuple[Array, float]]] = defaultdict(dict)
        """By (micro-batch, segment), then by external input."""
        self._ready: set[tuple[int, int]] = set()
        """Those of which everything is here."""
        self._given: set[tuple[int, int]] = set()

    @property
    def attempt(self) -> int:
        """The newest."""
        return self._at[1]

    def takes(self, of: Validated, decided: int) -> bool:
        """Whether this attempt counts, `decided` being the last step; a newer one begins anew."""
        at = (of.step, of.attempt)
        if of.step < decided or at < self._at:
            return False
        if at > self._at:
            self._begin(at)
        return True

    def offer(self, of: Validated, place: Local, tensor: Array, weight: float) -> Offer:
        """A tensor of an attempt that counts."""
        key = (of.micro, place.segment)
        if key in self._given or place.index in self._arrived[key]:
            return Offer.DUPLICATE
        self._arrived[key][place.index] = (tensor, weight)
        if len(self._arrived[key]) == self._needed[place.segment]:
            self._ready.add(key)
        return Offer.TAKEN

    def ready(self, decided: int) -> bool:
        """Whether a pass may run, `decided` being the last step."""
        return bool(self._ready) and self._at[0] == decided

    def take(self) -> Inputs:
        """Give out the pass that is first."""
        key = min(self._ready)
        self._ready.discard(key)
        self._given.add(key)
        arrived, (micro, segment) = self._arrived.pop(key), key
        found = [arrived[index] for index in range(self._needed[segment])]
        return Inputs(Validated(*self._at, micro), segment, tuple(tensor for tensor, _ in found), tuple(weight for _, weight in found))

    def decide(self, step: int) -> None:
        """Step `step` is over: validations of older ones are."""
        if self._at[0] < step:
            self._begin((step, 0))

    def validate(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        whole = {key for key, arrived in self._arrived.items() if len(arrived) == self._needed[key[1]]}
        if whole != self._ready or self._given & self._arrived.keys():
            raise InvariantError(f"validation of step {self._at[0]}: {len(self._ready)} passes ready, {len(whole)} have their inputs")

    def _begin(self, at: tuple[int, int]) -> None:
        self._at = at
        for kept in (self._arrived, self._ready, self._given):
            kept.clear()
