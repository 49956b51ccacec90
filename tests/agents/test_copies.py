"""The copies that a PNode keeps, and their uploads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dcnr.agents.commands import Command, SendReport, Upload
from dcnr.agents.copies import KEPT, REMEMBERED, TOO_SLOW, Copies, Copy
from dcnr.bus.messages import Report, Saved, SavedPart, SaveFailed
from tests.agents.tiny import SESSION, A, B, deploy_of, graph_of

PART = SavedPart("key", "00", 3, ("up.weight",))
DEPLOY = deploy_of(dict.fromkeys(graph_of().by_id, A), storage="file:///somewhere")


def copy_of(step: int) -> Copy:
    """The state after a step."""
    return Copy(step, {"up.weight": np.full(3, step, np.float32)}, {"updates": step})


@pytest.fixture
def copies() -> Iterator[Copies]:
    """Of a session that began with the seed."""
    made = Copies(A, DEPLOY, None)
    yield made
    made.validate()


def uploads(commands: list[Command] | None) -> list[int]:
    """Which steps go to storage."""
    return [command.step for command in commands or () if isinstance(command, Upload)]


def said(commands: list[Command] | None) -> list[Report]:
    """What is reported."""
    return [command.report for command in commands or () if isinstance(command, SendReport)]


def test_the_newest_complete_one_and_newer_ones_are_kept(copies: Copies) -> None:
    """A copy goes when a later checkpoint is complete, and no sooner."""
    for step in (0, 2, 4):
        copies.taken(copy_of(step))
    copies.complete(2)
    assert [step for step in range(5) if copies.get(step)] == [2, 4]
    copies.complete(0)  # heard late
    assert [step for step in range(5) if copies.get(step)] == [2, 4]


def test_at_most_three_are_kept_and_the_complete_one_is_among_them(copies: Copies) -> None:
    """Storage is slow: of those that wait, the oldest goes, and it is said that it was not saved."""
    assert uploads(copies.taken(copy_of(0))) == [0]
    copies.uploaded(0, PART, None)
    copies.complete(0)
    assert uploads(copies.taken(copy_of(1))) == [1]
    assert copies.taken(copy_of(2)) == []
    assert said(copies.taken(copy_of(3))) == [SaveFailed(A, SESSION, DEPLOY.epoch, 2, TOO_SLOW)]
    assert [step for step in range(5) if copies.get(step)] == [0, 1, 3]
    assert uploads(copies.uploaded(1, PART, None)) == [3]


def test_one_upload_at_a_time_in_the_order_of_steps(copies: Copies) -> None:
    """The next one goes when the one before is over, well or not; each is told."""
    (first,) = copies.taken(copy_of(1))
    assert isinstance(first, Upload)
    assert (first.storage, first.state, list(first.tensors)) == (DEPLOY.storage, {"updates": 1}, ["up.weight"])
    assert copies.taken(copy_of(2)) == []
    assert copies.taken(copy_of(3)) == []
    after = copies.upload_failed(1, "disk full")
    assert said(after) == [SaveFailed(A, SESSION, DEPLOY.epoch, 1, "disk full")]
    assert uploads(after) == [2]
    after = copies.uploaded(2, PART, {"updates": 2})
    assert said(after) == [Saved(A, SESSION, DEPLOY.epoch, 2, PART, {"updates": 2})]
    assert uploads(after) == [3]


def test_a_failed_upload_is_tried_again_when_asked_for(copies: Copies) -> None:
    """The copy stays; an upload that is on its way is not begun twice, and a finished one is only said again."""
    copies.taken(copy_of(1))
    assert copies.save(1) == []
    copies.upload_failed(1, "disk full")
    assert uploads(copies.save(1)) == [1]
    saved = said(copies.uploaded(1, PART, None))
    assert said(copies.save(1)) == saved
    assert uploads(copies.save(1)) == []


def test_of_a_step_without_copy_nothing_can_be_saved(copies: Copies) -> None:
    """Somebody else must make one."""
    assert copies.save(1) is None


def test_an_upload_that_no_one_needs_any_more_is_left_out(copies: Copies) -> None:
    """A later checkpoint became complete meanwhile."""
    for step in (1, 2, 3):
        copies.taken(copy_of(step))
    copies.complete(3)
    assert uploads(copies.upload_failed(1, "slow")) == [3]


def test_only_the_last_ends_are_remembered(copies: Copies) -> None:
    """Memory is bounded."""
    for step in range(REMEMBERED + 1):
        copies.complete(step)
        copies.taken(copy_of(step))
        copies.uploaded(step, PART, None)
    assert copies.save(0) is None
    assert said(copies.save(1))


def test_what_was_inherited_serves_until_it_is_known_what_is_needed() -> None:
    """Then exactly that is kept, with the state that the deploy says, if steps are decided here."""
    for homes, state in ((dict.fromkeys(graph_of().by_id, A), {"updates": 5}), ({"up": A, "down": B}, None)):
        deploy = deploy_of(homes, step=5, checkpoint="somewhere")  # type: ignore[arg-type]  # any names will do
        deploy.state.update({"updates": 5})
        copies = Copies(A, deploy, copy_of(5))
        assert copies.get(5) is not None
        tensors = {"down.weight": np.zeros(3, np.float32)}
        copies.begin(tensors)
        copy = copies.get(5)
        assert copy is not None
        assert copy.tensors is tensors
        assert copy.state == (None if state is None else deploy.state)
        copies.validate()


def test_what_it_began_with_is_not_kept_if_a_newer_checkpoint_became_complete_meanwhile() -> None:
    """The deploy was late."""
    copies = Copies(A, DEPLOY, None)
    copies.complete(DEPLOY.step + 1)
    copies.begin(copy_of(DEPLOY.step).tensors)
    assert copies.get(DEPLOY.step) is None
    copies.validate()


def test_a_session_that_began_with_the_seed_has_no_copy_of_it() -> None:
    """Not even a part that was inherited: it would pass for the whole."""
    copies = Copies(A, DEPLOY, copy_of(0))
    copies.begin(None)
    assert copies.get(0) is None


class AnyOrder(RuleBasedStateMachine):
    """Copies, ends of uploads, completions and requests in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = Copies(A, DEPLOY, None)
        self.step = 0
        self.complete = -1
        self.on_the_way: list[int] = []
        self.goes_back: int | None = None
        """The newest complete step, if there was a copy of it when it became so."""

    def note(self, commands: list[Command] | None) -> None:
        """What goes to storage now."""
        self.on_the_way += uploads(commands)

    @rule(ahead=st.integers(1, 2))
    def take(self, ahead: int) -> None:
        """The state after a later step."""
        self.step += ahead
        self.note(self.copies.taken(copy_of(self.step)))

    @rule(well=st.booleans())
    def end(self, well: bool) -> None:
        """The upload under way ends."""
        if self.on_the_way:
            step = self.on_the_way.pop()
            self.note(self.copies.uploaded(step, PART, None) if well else self.copies.upload_failed(step, "no"))

    @rule(back=st.integers(0, 4))
    def finish(self, back: int) -> None:
        """A checkpoint is complete."""
        step = self.step - back
        if step > self.complete:
            self.complete, self.goes_back = step, step if self.copies.get(step) else None
        self.copies.complete(step)

    @rule(back=st.integers(0, 4))
    def ask(self, back: int) -> None:
        """The orchestrator asks."""
        self.note(self.copies.save(self.step - back))

    @invariant()
    def is_bounded(self) -> None:
        """One upload at a time, few copies; the newest stays, and the newest complete one, if there was a copy of it when it became so."""
        self.copies.validate()
        assert len(self.on_the_way) <= 1
        kept = [step for step in range(self.step + 1) if self.copies.get(step)]
        assert len(kept) <= KEPT
        assert not kept or kept[0] >= self.complete
        assert not self.step or self.copies.get(self.step)
        assert self.goes_back is None or self.copies.get(self.goes_back)


TestAnyOrder = AnyOrder.TestCase
