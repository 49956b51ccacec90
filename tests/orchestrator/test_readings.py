"""All checkpoints that are read: one reading each, placed when there is somebody to wait for it."""

from __future__ import annotations

from dcnr.bus.messages import Deploy
from dcnr.ids import NEVER, Epoch, PNodeId
from dcnr.orchestrator.commands import Publish
from dcnr.orchestrator.events import Lost, Tick
from dcnr.orchestrator.readings import Readings
from tests.orchestrator.fakes import info
from tests.orchestrator.reader import SETTINGS, Stage, ask, source


def epochs(commands: list[object]) -> list[int]:
    """Of the deploys in it."""
    return [command.message.epoch for command in commands if isinstance(command, Publish) and isinstance(command.message, Deploy)]


def test_one_reading_serves_all_requests_for_a_checkpoint() -> None:
    """Another checkpoint has one of its own; requests are found by their ids."""
    readings = Readings(SETTINGS, lambda _name: [info("a")])
    assert epochs([*readings.generate(ask("one"), NEVER, 0.0)]) == [1]
    assert epochs([*readings.generate(ask("two"), NEVER, 0.0)]) == []
    other = ask("three", source=source(step=4))
    assert epochs([*readings.generate(other, NEVER, 0.0)]) == [1]
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
    assert epochs([*later.generate(ask(), Epoch(5), 0.0)]) == [6]
    assert later.uses(source().name, PNodeId("a"), Epoch(6))
    assert not later.uses(source().name, PNodeId("a"), Epoch(5))


def test_what_goes_back_is_placed_again_at_once_unless_it_was_refused() -> None:
    """A refusal would only come again."""
    stage = Stage("a")
    readings = Readings(SETTINGS, lambda _name: [info("a")])
    readings.generate(ask(), NEVER, 0.0)
    stage.reading = readings.all[source().name]
    assert epochs([*readings.handle(source().name, Lost(PNodeId("a"), "it died"), 0.0)]) == [2]
    assert epochs([*readings.handle(source().name, stage.refused("a", damaged=False), 0.0)]) == []
    assert epochs([*readings.place(1.0)]) == [3]


def test_what_has_ended_is_forgotten_but_for_its_epoch() -> None:
    """A minute after the last question."""
    readings = Readings(SETTINGS, lambda _name: [])
    readings.generate(ask(), Epoch(4), 0.0)
    assert readings.deadline() == 60.0
    readings.handle(source().name, Tick(), 60.0)
    assert readings.over() == {source().name: 4}
    assert readings.all == {}
    assert readings.deadline() is None
