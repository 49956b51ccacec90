"""Heartbeats and silence in, changes of the fleet out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from dcnr.bus.messages import Heartbeat, Hosted
from dcnr.ids import Epoch, PNodeId, SessionId
from dcnr.orchestrator.events import Disconnected, DrainPNode, Echoed, Heard, Tick
from dcnr.orchestrator.fleet import (
    CUT_OFF,
    DEAD_AFTER_CUT,
    DEAF_AFTER,
    SUSPECT_AFTER,
    Changed,
    Drained,
    Fleet,
    FleetChange,
    Forgotten,
    Gone,
    Joined,
)
from dcnr.orchestrator.state import PNodeRecord, PNodeState
from tests.orchestrator.fakes import info

A = PNodeId("a")


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """An empty fleet at time 0; its state must make sense at the end."""
    fleet = Fleet((), 0.0)
    yield fleet
    fleet.validate()


def beat(name: str = "a", incarnation: str = "1", stopping: bool = False) -> Heard:
    """A heartbeat of PNode `name`."""
    return Heard(Heartbeat(info(name, incarnation), (), stopping))


def judged(fleet: Fleet, now: float) -> list[FleetChange]:
    """What a deadline brings after a time in which we heard ourselves every half second."""
    for half in range(int(fleet._echoed * 2) + 1, int(now * 2) + 1):
        assert fleet.handle(Echoed(), half / 2) == []
    return fleet.handle(Tick(), now)


def state(fleet: Fleet) -> PNodeState:
    """Of PNode a."""
    return fleet.members[A].record.state


def test_first_heartbeat_makes_a_pnode_join(fleet: Fleet) -> None:
    """An unheard PNode is written down, joins, and may take work."""
    assert fleet.handle(beat(), 0.0) == [Changed(PNodeRecord(info("a"), PNodeState.ALIVE)), Joined(A)]
    assert fleet.eligible() == (info("a"),)


def test_heartbeats_in_time_change_nothing(fleet: Fleet) -> None:
    """A PNode that is heard every 0.5 s stays alive, silently."""
    fleet.handle(beat(), 0.0)
    assert [fleet.handle(event, now) for now in (0.5, 1.0, 1.5, 2.0) for event in (beat(), Tick())] == [[]] * 8


def test_silence_of_a_second_and_a_half_makes_suspect_and_of_three_dead(fleet: Fleet) -> None:
    """The deadlines are exactly those, and the reason is in words."""
    judged(fleet, 10.0)
    fleet.handle(beat(), 10.0)
    assert fleet.deadline() == 11.5
    assert judged(fleet, 11.49) == []
    assert judged(fleet, 11.5) == [Changed(PNodeRecord(info("a"), PNodeState.SUSPECT, "silent for 1.5 s"))]
    assert fleet.eligible() == ()
    assert fleet.deadline() == 13.0
    reason = "PNode a has been silent for 3.0 s"
    assert judged(fleet, 13.0) == [Changed(PNodeRecord(info("a"), PNodeState.DEAD, reason)), Gone(A, reason)]


def test_a_suspect_that_is_heard_again_is_alive_and_did_not_join_anew(fleet: Fleet) -> None:
    """Nothing it hosted was lost, so nobody is told that it joined."""
    fleet.handle(beat(), 0.0)
    judged(fleet, 2.0)
    assert fleet.handle(beat(), 2.1) == [Changed(PNodeRecord(info("a"), PNodeState.ALIVE))]


def test_a_dead_pnode_that_wakes_up_joins_anew(fleet: Fleet) -> None:
    """What it hosted was given up; it comes back as one that can take work."""
    fleet.handle(beat(), 0.0)
    judged(fleet, 3.0)
    assert fleet.handle(beat(), 4.0)[-1] == Joined(A)
    assert state(fleet) is PNodeState.ALIVE


def test_a_rival_under_the_same_name_disturbs_nobody(fleet: Fleet) -> None:
    """While the first process is heard, the second is not believed."""
    fleet.handle(beat(), 0.0)
    assert fleet.handle(beat(incarnation="2"), 0.2) == []
    assert fleet.eligible() == (info("a"),)


def test_another_incarnation_means_that_the_old_process_died(fleet: Fleet) -> None:
    """Once it has been silent for long enough; it is gone before the new one joins."""
    fleet.handle(beat(), 0.0)
    changes = fleet.handle(beat(incarnation="2"), SUSPECT_AFTER)
    assert [type(change) for change in changes] == [Changed, Gone, Changed, Joined]
    assert changes[1] == Gone(A, "PNode a started anew as process 1")
    assert fleet.members[A].record.info.incarnation == "2"


def test_a_new_incarnation_of_a_dead_pnode_only_joins(fleet: Fleet) -> None:
    """It cannot die twice."""
    fleet.handle(beat(), 0.0)
    judged(fleet, 3.0)
    assert [type(change) for change in fleet.handle(beat(incarnation="2"), 4.0)] == [Changed, Joined]


def test_a_good_bye_is_believed_at_once(fleet: Fleet) -> None:
    """It is gone without a time-out, and silent afterwards without being dead."""
    fleet.handle(beat(), 0.0)
    assert fleet.handle(beat(stopping=True), 0.1)[-1] == Gone(A, "PNode a was stopped")
    assert judged(fleet, 10.0) == []
    assert fleet.handle(beat(stopping=True), 10.1) == []
    assert state(fleet) is PNodeState.STOPPED


def test_the_good_bye_of_another_incarnation_is_ignored(fleet: Fleet) -> None:
    """A late word of the old process does not take the new one away."""
    fleet.handle(beat(incarnation="2"), 0.0)
    assert fleet.handle(beat(incarnation="1", stopping=True), 0.1) == []
    assert fleet.handle(beat("b", stopping=True), 0.1) == []
    assert state(fleet) is PNodeState.ALIVE


def test_a_drained_pnode_gets_no_new_work_until_it_starts_anew(fleet: Fleet) -> None:
    """Drain once: told once, written down, not eligible."""
    fleet.handle(beat(), 0.0)
    drained = PNodeRecord(info("a"), PNodeState.ALIVE, draining=True)
    assert fleet.handle(DrainPNode(1, A), 0.1) == [Changed(drained), Drained(A)]
    assert fleet.handle(DrainPNode(2, A), 0.2) == []
    assert fleet.eligible() == ()
    fleet.handle(beat(incarnation="2"), SUSPECT_AFTER)
    assert fleet.eligible() == (info("a", "2"),)


def test_draining_an_unknown_pnode_changes_nothing(fleet: Fleet) -> None:
    """An illegal event has no effect."""
    assert fleet.handle(DrainPNode(1, A), 0.0) == []


def test_the_gone_are_forgotten_after_ten_minutes(fleet: Fleet) -> None:
    """A list of PNodes does not grow for ever."""
    fleet.handle(beat(), 0.0)
    judged(fleet, 3.0)
    assert fleet.deadline() == 600.0
    assert judged(fleet, 600.0) == [Forgotten(A)]
    assert fleet.deadline() is None


def test_a_new_leader_gives_everyone_a_full_time_out(fleet: Fleet) -> None:
    """A PNode of the records is not dead before its heartbeat can have come."""
    later = Fleet((PNodeRecord(info("a"), PNodeState.ALIVE),), 100.0)
    assert judged(later, 101.4) == []
    assert later.eligible() == ()
    assert judged(later, 103.0)[-1] == Gone(A, "PNode a has been silent for 3.0 s")


def test_a_new_leader_gives_work_only_to_those_it_heard(fleet: Fleet) -> None:
    """A record may be of a PNode that is gone; its first heartbeat counts as joining, without being written down again."""
    later = Fleet((PNodeRecord(info("a"), PNodeState.ALIVE),), 100.0)
    assert later.present() == (info("a"),)
    assert later.handle(beat(), 100.2) == [Joined(A)]
    assert later.handle(beat(), 100.7) == []
    assert later.eligible() == (info("a"),)


def test_the_newest_memory_and_sessions_are_known(fleet: Fleet) -> None:
    """A heartbeat replaces what was known, without being written down."""
    fleet.handle(beat(), 0.0)
    hosted = (Hosted(SessionId("s"), Epoch(1), 3, 2, 100),)
    fuller = replace(info("a"), memory_used=500)
    assert fleet.handle(Heard(Heartbeat(fuller, hosted)), 0.5) == []
    assert fleet.members[A].record.info == fuller
    assert fleet.members[A].hosted == hosted


def test_memory_that_sessions_may_come_to_need_is_not_offered(fleet: Fleet) -> None:
    """What a backend happens to hold says little: a pool keeps what it once had, and a session that was just deployed has little yet."""
    hosted = tuple(Hosted(SessionId(name), Epoch(1), 0, 2, size) for name, size in (("s", 100), ("t", 20)))
    fleet.handle(Heard(Heartbeat(replace(info("a"), memory_used=500), hosted)), 0.0)
    assert fleet.eligible() == (replace(info("a"), memory_used=120),)


# -- what our own echo is for ----------------------------------------------------------------------------------------------


def test_nobody_is_judged_while_we_do_not_hear_ourselves(fleet: Fleet) -> None:
    """Neither suspect nor dead, however long it takes, and no deadline wakes us for it."""
    fleet.handle(beat(), 0.0)
    fleet.handle(Disconnected(A), 0.1)
    assert fleet.handle(Tick(), DEAF_AFTER + 0.01) == []
    assert (fleet.deaf, fleet.deadline()) == (True, None)
    assert fleet.handle(Tick(), 1000.0) == []
    assert state(fleet) is PNodeState.ALIVE


def test_when_our_echo_is_back_everyone_has_a_full_time_out(fleet: Fleet) -> None:
    """As if it had been heard in that moment; a closed connection from before counts no more."""
    fleet.handle(beat(), 0.0)
    fleet.handle(Disconnected(A), 0.1)
    fleet.handle(Tick(), 50.0)
    assert fleet.handle(Echoed(), 60.0) == []
    assert (fleet.deaf, fleet.deadline()) == (False, 61.5)
    assert judged(fleet, 61.4) == []
    assert judged(fleet, 63.0)[-1] == Gone(A, "PNode a has been silent for 3.0 s")


def test_a_leader_that_was_stopped_for_twenty_seconds_judges_nobody_by_what_it_missed(fleet: Fleet) -> None:
    """Its first event after that may be a deadline, with all the heartbeats still in the queue."""
    fleet.handle(beat(), 0.0)
    judged(fleet, 0.6)
    assert fleet.handle(Tick(), 20.6) == []
    assert fleet.handle(beat(), 20.6) == []
    assert fleet.handle(Echoed(), 20.6) == []
    assert state(fleet) is PNodeState.ALIVE


def test_the_gone_stay_gone_when_our_echo_is_back(fleet: Fleet) -> None:
    """The grace is for those that may be there."""
    fleet.handle(beat(), 0.0)
    judged(fleet, 3.0)
    fleet.handle(Tick(), 50.0)
    fleet.handle(Echoed(), 60.0)
    assert (state(fleet), fleet.deadline()) == (PNodeState.DEAD, 600.0)


# -- what the server says of connections -----------------------------------------------------------------------------------


def test_a_pnode_whose_connection_was_closed_is_dead_if_it_is_not_heard_again(fleet: Fleet) -> None:
    """Well within a second, with the reason in words."""
    fleet.handle(beat(), 10.0)
    judged(fleet, 10.4)
    assert fleet.handle(Disconnected(A), 10.4) == []
    assert fleet.deadline() == 10.4 + DEAD_AFTER_CUT < 11.4
    reason = f"PNode a: {CUT_OFF}"
    assert judged(fleet, 10.4 + DEAD_AFTER_CUT) == [Changed(PNodeRecord(info("a"), PNodeState.DEAD, reason)), Gone(A, reason)]


def test_a_pnode_that_connects_again_is_not_dead(fleet: Fleet) -> None:
    """Its next heartbeat says so, and the usual silence counts from there."""
    fleet.handle(beat(), 0.0)
    fleet.handle(Disconnected(A), 0.1)
    assert fleet.handle(beat(), 0.5) == []
    assert judged(fleet, 1.9) == []
    assert fleet.deadline() == 2.0


def test_a_connection_of_nobody_we_know_changes_nothing(fleet: Fleet) -> None:
    """Nor does that of one that said good-bye."""
    assert fleet.handle(Disconnected(A), 0.0) == []
    fleet.handle(beat(), 0.1)
    fleet.handle(beat(stopping=True), 0.2)
    assert fleet.handle(Disconnected(A), 0.2) == []
    assert fleet.deadline() == 600.1


def test_a_process_that_is_started_anew_after_a_kill_joins_within_a_second(fleet: Fleet) -> None:
    """As soon as the old one is dead; before that it is not believed."""
    fleet.handle(beat(), 0.0)
    fleet.handle(Disconnected(A), 0.1)
    assert fleet.handle(beat(incarnation="2"), 0.3) == []
    judged(fleet, 0.1 + DEAD_AFTER_CUT)
    assert fleet.handle(beat(incarnation="2"), 0.9)[-1] == Joined(A)
