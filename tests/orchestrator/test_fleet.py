"""Heartbeats and silence in, changes of the fleet out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from dcnr.bus.messages import Heartbeat, Hosted
from dcnr.ids import Epoch, PNodeId, SessionId
from dcnr.orchestrator.events import DrainPNode, Heard, Tick
from dcnr.orchestrator.fleet import SUSPECT_AFTER, Changed, Drained, Fleet, Forgotten, Gone, Joined
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
    fleet.handle(beat(), 10.0)
    assert fleet.deadline() == 11.5
    assert fleet.handle(Tick(), 11.49) == []
    assert fleet.handle(Tick(), 11.5) == [Changed(PNodeRecord(info("a"), PNodeState.SUSPECT, "silent for 1.5 s"))]
    assert fleet.eligible() == ()
    assert fleet.deadline() == 13.0
    reason = "PNode a has been silent for 3.0 s"
    assert fleet.handle(Tick(), 13.0) == [Changed(PNodeRecord(info("a"), PNodeState.DEAD, reason)), Gone(A, reason)]


def test_a_suspect_that_is_heard_again_is_alive_and_did_not_join_anew(fleet: Fleet) -> None:
    """Nothing it hosted was lost, so nobody is told that it joined."""
    fleet.handle(beat(), 0.0)
    fleet.handle(Tick(), 2.0)
    assert fleet.handle(beat(), 2.1) == [Changed(PNodeRecord(info("a"), PNodeState.ALIVE))]


def test_a_dead_pnode_that_wakes_up_joins_anew(fleet: Fleet) -> None:
    """What it hosted was given up; it comes back as one that can take work."""
    fleet.handle(beat(), 0.0)
    fleet.handle(Tick(), 3.0)
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
    fleet.handle(Tick(), 3.0)
    assert [type(change) for change in fleet.handle(beat(incarnation="2"), 4.0)] == [Changed, Joined]


def test_a_good_bye_is_believed_at_once(fleet: Fleet) -> None:
    """It is gone without a time-out, and silent afterwards without being dead."""
    fleet.handle(beat(), 0.0)
    assert fleet.handle(beat(stopping=True), 0.1)[-1] == Gone(A, "PNode a was stopped")
    assert fleet.handle(Tick(), 10.0) == []
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
    fleet.handle(Tick(), 3.0)
    assert fleet.deadline() == 600.0
    assert fleet.handle(Tick(), 600.0) == [Forgotten(A)]
    assert fleet.deadline() is None


def test_a_new_leader_gives_everyone_a_full_time_out(fleet: Fleet) -> None:
    """A PNode of the records is not dead before its heartbeat can have come."""
    later = Fleet((PNodeRecord(info("a"), PNodeState.ALIVE),), 100.0)
    assert later.handle(Tick(), 101.4) == []
    assert later.eligible() == ()
    assert later.handle(Tick(), 103.0)[-1] == Gone(A, "PNode a has been silent for 3.0 s")


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
