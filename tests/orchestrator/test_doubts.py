"""Which PNodes a session would rather do without."""

from __future__ import annotations

import pytest

from dcnr.bus.messages import Hosted
from dcnr.ids import Epoch
from dcnr.orchestrator.doubts import SETBACKS, Doubts
from tests.orchestrator.fakes import SESSION
from tests.orchestrator.story import A, B


def hosted(work: int, busy: bool) -> Hosted:
    """What a PNode says of its part."""
    return Hosted(SESSION, Epoch(1), 5, 1, 1, work=work, busy=busy)


@pytest.mark.parametrize("said", [None, hosted(7, busy=False), hosted(8, busy=True)], ids=["nothing there", "idle", "moved"])
def test_one_that_is_stuck_is_left_alone_until_it_moves(said: Hosted | None) -> None:
    """Or has nothing to do any more; while it stands where it stood, it is stuck."""
    doubts = Doubts()
    doubts.stuck(A, 7)
    doubts.stands(A, hosted(7, busy=True))
    doubts.stands(B, None)
    assert doubts.avoided == {A: 7}
    doubts.stands(A, said)
    assert not doubts.avoided


def test_a_step_that_is_done_clears_who_failed_and_a_new_process_who_refused() -> None:
    """A resume clears both."""
    doubts = Doubts()
    doubts.failed(A)
    doubts.refused(B)
    doubts.failed(B)
    doubts.step_done()
    assert (set(doubts.shunned), doubts.setbacks) == ({B}, 0)
    doubts.lost(B)
    assert not doubts.shunned
    doubts.refused(A)
    doubts.begin()
    assert not doubts.shunned


def test_the_world_may_fail_a_few_times_without_a_step_done() -> None:
    """Once more is too often."""
    doubts = Doubts()
    assert [doubts.failed(A) for _ in range(SETBACKS + 1)] == [False] * SETBACKS + [True]
