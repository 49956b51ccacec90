"""All checkpoints that are read: one reading each, placed when there is somebody to wait for it."""

from __future__ import annotations

from dcnr.bus.messages import Deploy, Undeploy
from dcnr.ids import NEVER, Epoch, PNodeId, SessionId
from dcnr.orchestrator.commands import Publish
from dcnr.orchestrator.events import StopGenerating, Tick
from dcnr.orchestrator.readings import Readings
from tests.orchestrator.fakes import info
from tests.orchestrator.reader import SETTINGS, ask, source


def epochs(commands: list[object]) -> list[int]:
    """Of the deploys in it."""
    return [command.message.epoch for command in commands if isinstance(command, Publish) and isinstance(command.message, Deploy)]


def test_one_reading_serves_all_requests_for_a_checkpoint() -> None:
    """Another checkpoint has one of its own; requests are found by their ids."""
    readings = Readings(SETTINGS, lambda _name: [info("a")])
    assert epochs([*readings.generate(ask("one"), NEVER, 0.0), *readings.place(0.0)]) == [1]
    assert epochs([*readings.generate(ask("two"), NEVER, 0.0), *readings.place(0.0)]) == []
    other = ask("three", source=source(step=4))
    assert epochs([*readings.generate(other, NEVER, 0.0), *readings.place(0.0)]) == [1]
    assert readings.steps_of(source().session) == {3, 4}
    assert readings.steps_of(SessionId("other")) == set()
    assert len(readings.all) == 2
    found = readings.find("three")
    assert found is not None
    assert found[0].source.step == 4
    assert readings.find("four") is None


def test_a_new_reading_begins_beyond_every_epoch_that_pnodes_know() -> None:
    """Of its time before, or of what a heartbeat says."""
    readings = Readings(SETTINGS, lambda _name: [])
    readings.generate(ask(), Epoch(5), 0.0)
    readings.heard(source().name, Epoch(8))
    assert readings.waiting
    later = Readings(SETTINGS, lambda _name: [info("a")])
    assert epochs([*later.generate(ask(), Epoch(5), 0.0), *later.place(0.0)]) == [6]
    assert later.uses(source().name, PNodeId("a"), Epoch(6))
    assert not later.uses(source().name, PNodeId("a"), Epoch(5))


def test_room_is_made_by_those_that_nobody_wants_anything_of() -> None:
    """They let go, and are there for whoever asks again or has not yet heard the end of a text."""
    readings = Readings(SETTINGS, lambda _name: [info("a")])
    readings.generate(ask(), NEVER, 0.0)
    readings.place(0.0)
    assert readings.make_room(0.0) == []
    readings.all[source().name].handle(StopGenerating(2, "r"), 0.0)
    (let_go,) = readings.make_room(0.0)
    assert let_go == Publish("dcnr.pnode.a.cmd", Undeploy(source().name, Epoch(1)))
    assert readings.make_room(0.0) == []
    assert readings.find("r") is not None
    assert not readings.waiting
    assert epochs([*readings.generate(ask("again"), NEVER, 0.0), *readings.place(0.0)]) == [2]


def test_what_has_ended_is_forgotten_but_for_its_epoch() -> None:
    """A minute after the last question."""
    readings = Readings(SETTINGS, lambda _name: [])
    readings.generate(ask(), Epoch(4), 0.0)
    assert readings.deadline() == 60.0
    readings.all[source().name].handle(Tick(), 60.0)
    assert readings.over() == {source().name: 4}
    assert readings.all == {}
    assert readings.deadline() is None
