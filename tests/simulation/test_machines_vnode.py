"""A VNode under any order of offers, runs, new attempts and decisions: each turn runs once, in order, with all that it needs."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dcnr.agents.vnode import Offer, Turn, VNode

NEEDED = {"fwd": 2, "bwd": 1}
MICRO_BATCHES = 2
PHASES = st.sampled_from(("fwd", "bwd"))


class Turns(RuleBasedStateMachine):
    """A VNode, and what should be known of it: what came for each turn, and how far each phase is."""

    def __init__(self) -> None:
        super().__init__()
        self.vnode = VNode(NEEDED["fwd"], NEEDED["bwd"], MICRO_BATCHES, 0)
        self.decided = 0
        self.done = {"fwd": 0, "bwd": 0}
        self.came: dict[tuple[str, int, int], set[int]] = {}

    @rule(phase=PHASES, ahead=st.integers(-1, 2), micro=st.integers(-1, MICRO_BATCHES), index=st.integers(0, 1))
    def offer(self, phase: str, ahead: int, micro: int, index: int) -> None:
        """A tensor comes, for any step around the present one."""
        step, index = max(0, self.decided + 1 + ahead), min(index, NEEDED[phase] - 1)
        over = step <= self.decided or (step == self.decided + 1 and micro < self.done[phase])
        came = self.came.setdefault((phase, step, micro), set())
        expected = Offer.STALE if over or not 0 <= micro < MICRO_BATCHES else Offer.DUPLICATE if index in came else Offer.TAKEN
        assert self.vnode.offer(phase, Turn(step, micro), index) is expected
        if expected is Offer.TAKEN:
            came.add(index)

    @precondition(lambda self: self.vnode.ready("fwd"))
    @rule()
    def forward(self) -> None:
        """The next forward is given out."""
        self.run("fwd")

    @precondition(lambda self: self.vnode.ready("bwd"))
    @rule()
    def backward(self) -> None:
        """The next backward is given out."""
        self.run("bwd")

    def run(self, phase: str) -> None:
        """In order, with everything there."""
        assert self.vnode.next(phase) == Turn(self.decided + 1, self.done[phase])
        assert len(self.came.pop((phase, self.decided + 1, self.done[phase]))) == NEEDED[phase]
        self.vnode.run(phase)
        self.done[phase] += 1

    @rule(ahead=st.integers(-1, 2))
    def renew(self, ahead: int) -> None:
        """A newer attempt of a step begins."""
        step = self.decided + 1 + ahead
        self.vnode.renew(step)
        if ahead == 0:
            self.done = {"fwd": 0, "bwd": 0}
        self.came = {at: came for at, came in self.came.items() if at[1] != step}

    @precondition(lambda self: self.done["bwd"] == MICRO_BATCHES)
    @rule()
    def decide(self) -> None:
        """The step was decided."""
        self.decided += 1
        self.vnode.decide(self.decided)
        self.done = {"fwd": 0, "bwd": 0}
        self.came = {at: came for at, came in self.came.items() if at[1] > self.decided}

    @invariant()
    def is_ready_when_all_is_there(self) -> None:
        """No sooner, no later."""
        self.vnode.validate()
        for phase, done in self.done.items():
            all_here = len(self.came.get((phase, self.decided + 1, done), ())) == NEEDED[phase]
            in_turn = phase == "fwd" or done < self.done["fwd"]
            assert self.vnode.ready(phase) == (done < MICRO_BATCHES and all_here and in_turn)

    def teardown(self) -> None:
        """Given what is missing, the step ends."""
        for phase in ("fwd", "bwd"):
            for micro in range(self.done[phase], MICRO_BATCHES):
                for index in range(NEEDED[phase]):
                    self.vnode.offer(phase, Turn(self.decided + 1, micro), index)
                assert self.vnode.ready(phase)
                self.vnode.run(phase)
        assert self.vnode.next("bwd") == Turn(self.decided + 1, MICRO_BATCHES)


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=60, stateful_step_count=50, derandomize=True, deadline=None)
