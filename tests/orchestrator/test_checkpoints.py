"""Checkpoints under way, and which ones stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dcnr.bus.messages import Deploy, Save, Saved, SaveFailed
from dcnr.errors import InvariantError
from dcnr.ids import PNodeId
from dcnr.optim.hyper import Hyper
from dcnr.orchestrator.checkpoints import LISTED, UNDER_WAY, Checkpoints, retained
from dcnr.orchestrator.commands import Command, Publish, WriteManifest
from dcnr.orchestrator.layout import deploy_of
from dcnr.orchestrator.state import CheckpointRecord
from tests.orchestrator.fakes import SESSION, graph, info, part, record
from tests.orchestrator.story import A, B

SCALER: dict[str, int | float] = {"updates": 3, "loss_scale": 1.0, "good_steps": 3, "dynamic": False}


def deploy(*hosts: PNodeId) -> Deploy:
    """Of the small network."""
    homes = {node.id: hosts[min(index, len(hosts) - 1)] for index, node in enumerate(graph().nodes)}
    return deploy_of(record(), graph(), homes, [info(host) for host in hosts], ("file:///data", None))


def checkpoints(*hosts: PNodeId) -> Checkpoints:
    """Of a deployment from the seed."""
    return Checkpoints(record(), deploy(*(hosts or (A, B))), "numpy on cpu")


def saved(pnode: PNodeId, step: int, state: dict[str, int | float] | None = None) -> Saved:
    """A part is in storage."""
    return Saved(pnode, SESSION, record().epoch, step, part(pnode, SESSION, step), state)


def failed(pnode: PNodeId, step: int) -> SaveFailed:
    """Storage refused a part."""
    return SaveFailed(pnode, SESSION, record().epoch, step, "the disk is full")


def asked(commands: list[Command]) -> list[tuple[str, int]]:
    """Who is asked to save which step."""
    return [(c.subject.split(".")[2], c.message.step) for c in commands if isinstance(c, Publish) and isinstance(c.message, Save)]


def test_one_that_is_asked_for_is_repeated_until_it_is_there_or_storage_refuses_it() -> None:
    """Training waits for it, and goes on without it when a part or the manifest is refused, and why is told."""
    one = checkpoints()
    assert asked(one.ask(4, SCALER, 0.0)) == [("a", 4), ("b", 4)]
    one.saved(saved(A, 4), 0.5)
    assert asked(one.repeat(2.0)) == [("b", 4)]
    assert one.trouble == "waits for checkpoint 4 of b"
    one.saved(saved(B, 4), 3.0)
    one.written(4)
    assert (one.asked, one.trouble, one.ask(4, SCALER, 4.0)) == (None, "", [])
    one.ask(6, SCALER, 5.0)
    one.failed(failed(A, 6))
    assert (one.asked, one.left_over(7)) == (None, ())
    assert one.trouble == "PNode a could not save checkpoint 6, trying again until there is a newer one: the disk is full"
    one.ask(8, SCALER, 6.0)
    assert one.left_over(8) == (6,)
    one.unwritten(8, "the disk is full", 7.0)
    assert one.asked is None
    assert one.deadline() == 9.0
    one.validate()
    one.asked = 9
    with pytest.raises(InvariantError):
        one.validate()


def test_training_waits_on_when_it_is_another_manifest_that_storage_refuses() -> None:
    """One of an earlier step is tried again by itself."""
    one = checkpoints()
    one.expect(7, SCALER, 0.0)
    one.ask(8, SCALER, 0.5)
    one.unwritten(7, "the disk is full", 1.0)
    assert one.asked == 8


def test_the_best_one_is_asked_for_until_a_newer_one_begins() -> None:
    """PNodes keep the copy that long, though training goes on."""
    one = checkpoints()
    one.ask(4, SCALER, 0.0)
    for second in (2.0, 4.0):
        one.failed(failed(B, 4))
        assert one.asked is None
        assert asked(one.repeat(second)) == [("a", 4), ("b", 4)]
    one.saved(saved(A, 4), 4.5)
    assert isinstance(one.saved(saved(B, 4), 4.5)[0], WriteManifest)
    one.written(4)
    one.ask(6, SCALER, 5.0)
    one.failed(failed(A, 6))
    one.expect(7, SCALER, 6.0)
    assert (asked(one.repeat(9.0)), one.left_over(8)) == ([("a", 7), ("b", 7)], (6,))
    one.validate()


def test_the_manifest_comes_when_every_part_is_there_once() -> None:
    """In the order of the names, with the scaler that the decision left; a repeated part changes nothing."""
    one = checkpoints()
    one.expect(4, SCALER, 0.0)
    assert one.saved(saved(B, 4), 1.0) == []
    assert one.saved(saved(B, 4), 1.0) == []
    (command,) = one.saved(saved(A, 4), 1.0)
    assert isinstance(command, WriteManifest)
    assert ([p.key for p in command.parts], command.step, command.scaler) == (["checkpoints/s/4/a", "checkpoints/s/4/b"], 4, SCALER)
    one.written(4)
    assert one.saved(saved(A, 4), 1.0) == []
    assert one.deadline() is None


def test_parts_of_strangers_and_of_unknown_steps_are_ignored() -> None:
    """Only who takes part, only what was decided to be saved."""
    one = checkpoints()
    assert [command for pnode in (PNodeId("z"), A, B) for command in one.saved(saved(pnode, 4), 1.0)] == []
    one.validate()


def test_a_pnode_that_decides_saves_when_it_wants_and_sends_its_scaler() -> None:
    """Without one there is no checkpoint, and the operator reads why."""
    one = checkpoints(A)
    assert one.saved(saved(A, 2), 1.0) == []
    assert "without the state of its loss scaler" in one.trouble
    (command,) = one.saved(saved(A, 2, SCALER), 1.0)
    assert isinstance(command, WriteManifest)
    assert command.scaler == SCALER


def test_what_is_wanted_is_asked_for_until_it_is_there() -> None:
    """Every two seconds, of those whose part is missing, whatever storage said."""
    one = checkpoints()
    assert asked(one.want(6, SCALER, 0.0)) == [("a", 6), ("b", 6)]
    one.failed(failed(B, 6))
    assert one.trouble == "PNode b could not save checkpoint 6, trying again: the disk is full"
    one.saved(saved(A, 6), 1.0)
    assert one.repeat(1.9) == []
    assert asked(one.repeat(2.0)) == [("b", 6)]
    assert one.deadline() == 4.0
    assert isinstance(one.saved(saved(B, 6), 4.0)[0], WriteManifest)
    one.written(6)
    assert (one.trouble, one.wanted, one.has(6)) == ("", None, True)


def test_one_that_is_not_wanted_is_left_out_when_storage_refuses() -> None:
    """Training goes on; the reason is told; what there is of it is named once, when a newer one is complete."""
    one = checkpoints()
    one.expect(2, SCALER, 0.0)
    one.failed(failed(A, 2))
    assert one.trouble == "PNode a could not save checkpoint 2, which is left out: the disk is full"
    assert [command for pnode in (A, B) for command in one.saved(saved(pnode, 2), 1.0)] == []
    one.expect(4, SCALER, 2.0)
    one.saved(saved(A, 4), 3.0)
    one.saved(saved(B, 4), 3.0)
    assert one.left_over(2) == ()
    assert one.left_over(4) == (2,)
    assert one.left_over(4) == ()
    one.written(4)
    assert one.trouble == ""
    one.failed(failed(A, 4))
    assert one.trouble == ""


def test_the_newest_one_under_way_is_asked_for_again() -> None:
    """A `Saved` that was lost does not cost a checkpoint."""
    one = checkpoints()
    one.expect(2, SCALER, 0.0)
    one.expect(4, SCALER, 1.0)
    one.saved(saved(A, 4), 1.5)
    assert asked(one.repeat(2.0)) == [("b", 4)]


def test_no_more_than_a_few_are_under_way() -> None:
    """The oldest are given up: storage is slower than training."""
    one = checkpoints()
    for step in range(1, UNDER_WAY + 4):
        one.expect(step, SCALER, 0.0)
    assert one.left_over(100) == (1, 2, 3)
    one.want(50, SCALER, 1.0)
    one.validate()
    assert [command for pnode in (A, B) for command in one.saved(saved(pnode, 1), 2.0)] == []


def test_a_manifest_that_storage_refused_is_tried_again() -> None:
    """After two seconds, and it says so meanwhile."""
    one = checkpoints()
    one.want(0, SCALER, 0.0)
    one.saved(saved(A, 0), 0.5)
    one.saved(saved(B, 0), 0.5)
    one.unwritten(0, "the disk is full", 1.0)
    assert one.trouble == "the manifest of checkpoint 0 could not be written, trying again: the disk is full"
    assert one.repeat(2.9) == []
    assert [type(command) for command in one.repeat(3.0)] == [WriteManifest]
    one.unwritten(9, "never asked for", 3.5)
    one.validate()


def test_the_checkpoint_that_a_deployment_starts_from_exists() -> None:
    """The seed is none."""
    assert not checkpoints().has(0)
    at = replace(record(), step=7, checkpoints=(CheckpointRecord(7, "k", SCALER),))
    started = deploy_of(at, graph(), dict.fromkeys(graph().by_id, A), [info("a")], ("file:///data", None))
    assert Checkpoints(at, started, "").has(7)


def test_a_machine_that_contradicts_itself_is_found() -> None:
    """What is wanted must be under way."""
    one = checkpoints()
    one.wanted = 3
    with pytest.raises(InvariantError):
        one.validate()


def test_the_newest_checkpoints_stay_and_those_of_round_steps() -> None:
    """The rest is removed, but never what a deployment is starting from, or the best validation."""
    known = [CheckpointRecord(step, str(step), SCALER) for step in (0, 5, 10, 15, 20, 25)]
    stay, gone = retained(known, Hyper(keep_last=2, keep_every=10), ())
    assert ([c.step for c in stay], gone) == ([0, 10, 20, 25], (5, 15))
    stay, gone = retained(known, Hyper(keep_last=1), (5, None))
    assert ([c.step for c in stay], gone) == ([5, 25], (0, 10, 15, 20))
    stay, gone = retained(known, Hyper(keep_last=1), (None, 10))
    assert ([c.step for c in stay], gone) == ([10, 25], (0, 5, 15, 20))


def test_a_record_lists_a_bounded_number_of_checkpoints() -> None:
    """What it no longer lists stays in storage."""
    known = [CheckpointRecord(step, str(step), SCALER) for step in range(LISTED + 50)]
    stay, gone = retained(known, Hyper(keep_every=1), ())
    assert (len(stay), stay[-1].step, gone) == (LISTED, LISTED + 49, ())
    stay, _ = retained(known, Hyper(keep_every=1), (3,))
    assert [c.step for c in stay] == [3, *range(50, LISTED + 50)]
