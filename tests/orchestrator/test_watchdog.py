"""When a deployment stands still, and who is to blame."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from dcnr.bus.messages import Hosted
from dcnr.ids import PNodeId
from dcnr.orchestrator.watchdog import (
    ABSENT_AFTER,
    PATIENCE,
    STUCK_AFTER,
    STUCK_AT_FIRST,
    STUCK_FACTOR,
    TRIES,
    Again,
    GiveUp,
    Sight,
    Verdict,
    Watchdog,
)
from tests.orchestrator.fakes import SESSION
from tests.orchestrator.story import FIRST, A, B

IDLE = Hosted(SESSION, FIRST, 0, 1, 1, work=5)
BUSY = replace(IDLE, busy=True)
UNDER_WAY = Sight(done=3, news=10, under_way=True)


def beats(
    dog: Watchdog, start: float, seconds: float, a: Hosted = IDLE, b: Hosted = IDLE, sight: Sight = UNDER_WAY
) -> list[tuple[float, Verdict]]:
    """Both PNodes beat every half second; every verdict, and when."""
    found: list[tuple[float, Verdict]] = []
    for half in range(1, int(seconds * 2) + 1):
        now = start + half / 2
        dog.heard(A, a, now)
        dog.heard(B, b, now)
        found += [(now, verdict)] if (verdict := dog.verdict(sight, now)) else []
        dog.validate()
    return found


def test_a_standstill_feeds_the_step_again_with_growing_patience_and_then_gives_up() -> None:
    """After 1.25 s, then twice as long each time; the fifth time is the last."""
    dog = Watchdog((A, B), 2, 0.0)
    dog.verdict(UNDER_WAY, 0.0)
    found = beats(dog, 0.0, 60.0)
    assert [verdict for _, verdict in found[: TRIES - 1]] == [Again()] * (TRIES - 1)
    gaps = [after - before for (before, _), (after, _) in pairwise(found)]
    assert [round(gap / PATIENCE) for gap in gaps[: TRIES - 2]] == [2, 4, 8]
    assert found[TRIES - 1][1] == GiveUp("step 4 stood still 5 times")


def test_a_validation_that_stands_still_is_named() -> None:
    """It is of the step that is done."""
    dog, sight = Watchdog((A, B), 2, 0.0), replace(UNDER_WAY, validation=True)
    dog.verdict(sight, 0.0)
    assert beats(dog, 0.0, 60.0, sight=sight)[TRIES - 1][1] == GiveUp("the validation of step 3 stood still 5 times")


def test_a_micro_batch_of_a_validation_that_came_through_starts_the_count_anew() -> None:
    """A long validation may lose many messages."""
    dog = Watchdog((A, B), 2, 0.0)
    for answered in range(TRIES * 2):
        sight = replace(UNDER_WAY, answered=answered)
        dog.verdict(sight, answered * 10.0)
        found = beats(dog, answered * 10.0, 6.0, sight=sight)
        assert {verdict for _, verdict in found} == {Again()}


def test_a_step_that_is_done_starts_the_count_anew() -> None:
    """Each step has its own tries."""
    dog = Watchdog((A, B), 0, 0.0)
    for step in range(20):
        sight = Sight(step, 10 + step, under_way=True)
        dog.verdict(sight, step * 3.0)
        assert [verdict for _, verdict in beats(dog, step * 3.0, 3.0, sight=sight)][:1] == [Again()]


def test_whoever_has_work_or_does_some_is_waited_for() -> None:
    """One that is busy, or whose work grows, or news of any kind."""
    for change in (replace(BUSY, work=5), None):
        dog = Watchdog((A, B), 2, 0.0)
        dog.verdict(UNDER_WAY, 0.0)
        for half in range(40):
            hosted = change or replace(IDLE, work=half)
            assert beats(dog, half / 2, 0.5, a=hosted) == []
    dog = Watchdog((A, B), 2, 0.0)
    for half in range(40):
        assert beats(dog, half / 2, 0.5, sight=replace(UNDER_WAY, news=half)) == []


def test_nothing_is_judged_while_the_orchestrator_has_not_fed_the_step() -> None:
    """PNodes that have nothing to do are right to do nothing."""
    dog = Watchdog((A, B), 2, 0.0)
    assert beats(dog, 0.0, 100.0, sight=replace(UNDER_WAY, under_way=False)) == []


def test_a_standstill_is_only_believed_of_pnodes_that_were_heard_since() -> None:
    """What one said before the news does not count."""
    dog = Watchdog((A, B), 2, 0.0)
    beats(dog, 0.0, 1.0)
    dog.heard(A, IDLE, 3.0)
    assert dog.verdict(replace(UNDER_WAY, news=11), 2.0) is None
    assert dog.verdict(replace(UNDER_WAY, news=11), 4.0) is None
    dog.heard(B, IDLE, 4.0)
    assert dog.verdict(replace(UNDER_WAY, news=11), 4.0) == Again()


def test_a_pnode_that_has_work_and_does_none_is_stuck() -> None:
    """After 45 s, once a step was done."""
    dog = Watchdog((A, B), 2, 0.0)
    ((now, verdict), *_) = beats(dog, 0.0, 60.0, b=BUSY)
    assert STUCK_AFTER <= now <= STUCK_AFTER + 1.0
    assert verdict == GiveUp("PNode b has work and did none of it for 45 s", B, 5)


def test_before_the_first_step_compiling_may_take_longer() -> None:
    """Five minutes."""
    dog = Watchdog((A, B), 3, 0.0)
    ((now, _), *_) = beats(dog, 0.0, 320.0, b=BUSY)
    assert STUCK_AT_FIRST <= now <= STUCK_AT_FIRST + 1.0


@pytest.mark.parametrize(("job", "stuck"), [(0.05, STUCK_AFTER), (20.0, STUCK_FACTOR * 20.0)])
def test_patience_with_work_follows_the_longest_job_that_was_seen(job: float, stuck: float) -> None:
    """Steps of 50 ms and of 200 s, with the same code and nothing to set."""
    dog, now = Watchdog((A, B), 0, 0.0), 0.0
    for done in range(1, 11):
        for work in range(10):
            sight = Sight(done, done * 10 + work, under_way=True)
            hosted = replace(BUSY, work=done * 10 + work)
            assert beats(dog, now, max(0.5, job), a=hosted, b=hosted, sight=sight) == []
            now += max(0.5, job)
    sight = Sight(10, 109, under_way=True)
    ((when, verdict), *_) = beats(dog, now, stuck + 30.0, a=replace(BUSY, work=109), sight=sight)
    assert isinstance(verdict, GiveUp)
    assert verdict.without == A
    assert stuck - job <= when - now <= stuck + 1.0


def test_a_pnode_that_never_answers_its_deploy_is_given_up() -> None:
    """Busy or not: it owes an answer."""
    dog = Watchdog((A, B), 0, 0.0)
    ((now, verdict), *_) = beats(dog, 0.0, 320.0, sight=Sight(0, 0, under_way=False, owing=(B,)))
    assert now >= STUCK_AT_FIRST
    assert isinstance(verdict, GiveUp)
    assert verdict.without == B


def test_a_pnode_that_does_not_host_the_session_has_forgotten_it() -> None:
    """Its heartbeats come, but do not list the session for ten seconds."""
    dog = Watchdog((A, B), 2, 0.0)
    for half in range(1, 20):
        dog.heard(A, IDLE, half / 2)
        assert dog.verdict(replace(UNDER_WAY, under_way=False), half / 2) is None
    verdict = dog.verdict(replace(UNDER_WAY, under_way=False), ABSENT_AFTER)
    assert verdict == GiveUp("PNode b is there, but has not hosted the session for 10 s", B, -1)


def test_after_a_time_of_deafness_everything_counts_from_anew() -> None:
    """An hour in which nobody could be heard blames nobody."""
    dog = Watchdog((A, B), 2, 0.0)
    beats(dog, 0.0, 1.0, b=BUSY)
    dog.forgive(3600.0)
    assert dog.verdict(UNDER_WAY, 3600.0) is None
    assert dog.deadline() > 3600.0
    assert next(now for now, _ in beats(dog, 3600.0, 60.0, b=BUSY)) >= 3600.0 + STUCK_AFTER


def test_the_deadline_is_when_there_will_be_a_verdict() -> None:
    """Not earlier, so that nobody is woken for nothing; not later."""
    dog = Watchdog((A, B), 2, 0.0)
    dog.verdict(UNDER_WAY, 0.0)
    beats(dog, 0.0, 1.0)
    due = dog.deadline()
    assert due == 0.5 + PATIENCE, "the first heartbeat told of work"
    assert dog.verdict(UNDER_WAY, due - 0.01) is None
    assert dog.verdict(UNDER_WAY, due) == Again()


def test_hosts_are_judged_by_name_whatever_else_is_due() -> None:
    """A PNode to blame comes before a standstill of everyone."""
    dog = Watchdog((A, PNodeId("z")), 2, 0.0)
    dog.verdict(UNDER_WAY, 0.0)
    dog.heard(A, IDLE, 1.0)
    dog.heard(PNodeId("z"), IDLE, 1.0)
    assert isinstance(dog.verdict(UNDER_WAY, 100.0), GiveUp)
