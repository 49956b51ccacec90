"""One segment in training: collects the tensors that its VNodes take from outside, and says what may run next.

Rule 1: a micro-batch runs as a whole: all VNodes of a segment take their turns together.
Rule 2: backward work goes before forward work, then the lowest (step, micro).
Rule 3: where the backward needs nothing from outside, it runs right after the forward, as one piece of work.
Rule 4: a tensor given out is forgotten here.
Rule 5: all VNodes begin a step again together.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcnr.agents.routing import SegmentRoutes
from dcnr.agents.vnode import Offer, Turn, VNode
from dcnr.backends.base import Array
from dcnr.errors import InvariantError
from dcnr.ids import NodeId


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What a segment would do next; None for a phase that is not part of it."""

    segment: int
    turn: Turn
    inputs: tuple[Array, ...] | None
    weights: tuple[float, ...]
    gradients: tuple[Array, ...] | None


class Segment:
    """The dispatch of one segment. `step`: the last one that was decided."""

    def __init__(self, routes: SegmentRoutes, micro_batches: int, step: int) -> None:
        self.routes = routes
        self._micro_batches = micro_batches
        self._tensors: dict[tuple[str, Turn, int], tuple[Array, float]] = {}
        self._takers = {
            "fwd": tuple(entry.consumers[0].node for entry in routes.inputs),
            "bwd": tuple(entry.use.port.node for entry in routes.incoming),
        }
        border = dict.fromkeys(self._takers["fwd"] + self._takers["bwd"])
        self.vnodes: dict[NodeId, VNode] = {
            node: VNode(self._takers["fwd"].count(node), self._takers["bwd"].count(node), micro_batches, step) for node in border
        }
        """Those that take something from outside."""

    def offer(self, phase: str, turn: Turn, index: int, tensor: Array, weight: float = 0.0) -> Offer:
        """Take external input (fwd) or incoming gradient (bwd) `index` of a micro-batch."""
        result = self.vnodes[self._takers[phase][index]].offer(phase, turn, index)
        if result is Offer.TAKEN:
            self._tensors[phase, turn, index] = (tensor, weight)
        return result

    def priority(self) -> tuple[bool, Turn] | None:
        """Of the work that may run now, lowest first; None if there is none."""
        if self.routes.backward and not self.routes.turns_around and self._ready("bwd"):
            return (False, self._next("bwd"))
        return (True, self._next("fwd")) if self._ready("fwd") else None

    def take(self) -> Work:
        """Give out the work that `priority` spoke of."""
        priority = self.priority()
        if priority is None:
            raise InvariantError(f"segment {self.routes.index} has nothing to do")
        forward, turn = priority
        backward = not forward or self.routes.turns_around
        inputs = self._give("fwd", turn, len(self.routes.inputs)) if forward else None
        gradients = self._give("bwd", turn, len(self.routes.incoming)) if backward else None
        for vnode in self.vnodes.values():
            if forward:
                vnode.run("fwd")
            if backward or not self.routes.backward:
                vnode.run("bwd")
        return Work(
            segment=self.routes.index,
            turn=turn,
            inputs=None if inputs is None else tuple(tensor for tensor, _ in inputs),
            weights=() if inputs is None else tuple(weight for _, weight in inputs),
            gradients=None if gradients is None else tuple(tensor for tensor, _ in gradients),
        )

    def begun(self) -> bool:
        """Whether anything of the step under way was given out."""
        return self._next("fwd").micro > 0

    def done(self) -> bool:
        """Whether every micro-batch of the step under way was given out, forward and backward."""
        return self._next("bwd").micro == self._micro_batches

    def decide(self, step: int) -> None:
        """Step `step` is over."""
        for vnode in self.vnodes.values():
            vnode.decide(step)
        self._tensors = {key: tensor for key, tensor in self._tensors.items() if key[1].step > step}

    def renew(self, step: int) -> None:
        """Step `step` is begun again, from its first micro-batch: what came for it is forgotten."""
        for vnode in self.vnodes.values():
            vnode.renew(step)
        self._tensors = {key: tensor for key, tensor in self._tensors.items() if key[1].step != step}

    def validate(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        for vnode in self.vnodes.values():
            vnode.validate()
        if len({(vnode.next("fwd"), vnode.next("bwd"), vnode.decided) for vnode in self.vnodes.values()}) > 1:
            raise InvariantError(f"the VNodes of segment {self.routes.index} are not at the same turn")

    def _next(self, phase: str) -> Turn:
        return next(iter(self.vnodes.values())).next(phase)

    def _ready(self, phase: str) -> bool:
        return all(vnode.ready(phase) for vnode in self.vnodes.values())

    def _give(self, phase: str, turn: Turn, count: int) -> list[tuple[Array, float]]:
        return [self._tensors.pop((phase, turn, index)) for index in range(count)]
