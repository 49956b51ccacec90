"""One deployment, where a session's story does not reach."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dcnr.bus.messages import Decision, Deploy, Deployed, Hosted, Save, Saved, SaveFailed, StepDone, StepReport
from dcnr.errors import InvariantError
from dcnr.ids import PNodeId
from dcnr.orchestrator.commands import Command, Publish, ReadBatch, SendHop, WriteManifest
from dcnr.orchestrator.deployment import Begun, Deployment, Settled
from dcnr.orchestrator.events import BatchRead, ManifestFailed, ManifestWritten, Standing, Tick
from dcnr.orchestrator.failover import Found
from dcnr.orchestrator.layout import deploy_of, plan_of, scaler_at
from dcnr.orchestrator.state import CheckpointRecord, SessionRecord, ValidationRecord
from dcnr.orchestrator.watchdog import GiveUp
from tests.orchestrator.fakes import SESSION, graph, info, part, record
from tests.orchestrator.story import FIRST, TWO, A, B, tokens

SCALER: dict[str, int | float] = {"updates": 5, "loss_scale": 1.0, "good_steps": 5, "dynamic": False}


def deployment(of: SessionRecord | None = None, *, alone: bool = False) -> Deployment:
    """Of the small network on PNodes a and b (or a alone), at time 0."""
    at = replace(of or record(steps=8), epoch=FIRST)
    homes = {node.id: A if alone or index == 0 else B for index, node in enumerate(graph().nodes)}
    deploy = deploy_of(at, graph(), homes, TWO, ("file:///data", None))
    return Deployment(at, deploy, plan_of(at, graph(), homes, PNodeId("t")), scaler_at(at, graph()), 0.0)


def at_five() -> SessionRecord:
    """A session that has a checkpoint of step 5."""
    return replace(record(steps=8), step=5, checkpoints=(CheckpointRecord(5, "k5", SCALER),))


def deployed(one: Deployment) -> list[Command]:
    """Everyone answers."""
    return [command for pnode in one.hosts for command in one.handle(Deployed(pnode, SESSION, FIRST, one.deploy.step, 1), 1.0)]


def taken(one: Deployment) -> object:
    """What it has come to, as the session takes it."""
    outcome, one.outcome = one.outcome, None
    one.validate()
    return outcome


def report(pnode: PNodeId, step: int, attempt: int = 0) -> StepReport:
    """Its part of a step is done."""
    return StepReport(pnode, SESSION, FIRST, step, attempt, {}, True, ())


def standing(name: str, **fields: object) -> Standing:
    """A heartbeat that lists the deployment."""
    hosted = Hosted(SESSION, FIRST, 5, 1, 1, **fields)  # type: ignore[arg-type]
    return Standing(info(name), hosted)


def kinds(commands: list[Command]) -> list[type]:
    """Of control messages."""
    return [type(command.message) for command in commands if isinstance(command, Publish)]


def written(step: int) -> ManifestWritten:
    """A manifest is in storage."""
    return ManifestWritten(SESSION, FIRST, CheckpointRecord(step, f"k{step}", SCALER))


def test_from_a_checkpoint_it_trains_as_soon_as_everyone_is_deployed() -> None:
    """Repeated answers change nothing."""
    one = deployment(at_five())
    assert kinds(one.deploys()) == [Deploy, Deploy]
    deployed(one)
    assert (taken(one), one.trains) == (Begun(), True)
    assert deployed(one) == []
    assert taken(one) is None


def test_from_the_seed_step_0_is_saved_first() -> None:
    """Nothing is fed before its manifest is written."""
    one = deployment()
    assert kinds(deployed(one)) == [Save, Save]
    assert taken(one) is None
    for pnode in one.hosts:
        commands = one.handle(Saved(pnode, SESSION, FIRST, 0, part(pnode, SESSION, 0), None), 1.0)
    assert isinstance(commands[0], WriteManifest)
    one.handle(written(0), 1.0)
    assert taken(one) == Begun()


def test_deploys_are_repeated_to_those_that_have_not_answered() -> None:
    """Every two seconds."""
    one = deployment(at_five())
    one.handle(Deployed(B, SESSION, FIRST, 5, 1), 1.0)
    assert one.handle(Tick(), 1.9) == []
    assert [c.subject for c in one.handle(Tick(), 2.0) if isinstance(c, Publish)] == ["dcnr.pnode.a.cmd"]
    assert one.deadline() == 4.0


def test_when_everything_is_done_the_state_is_saved_and_then_it_is_settled() -> None:
    """Step by step; a checkpoint that the decision asked for serves as the last one."""
    one = deployment(at_five())
    deployed(one)
    taken(one)
    for step in (6, 7, 8):
        for pnode in one.hosts:
            commands = one.handle(report(pnode, step), float(step))
    assert [type(c.message) for c in commands if isinstance(c, Publish)] == [Decision, Save, Save]
    assert taken(one) is None
    one.handle(written(8), 9.0)
    assert taken(one) == Settled()
    assert one.steps == 3


def test_a_stop_at_a_checkpoint_that_exists_settles_at_once() -> None:
    """Nothing has been fed since."""
    one = deployment(at_five())
    deployed(one)
    taken(one)
    assert one.stop(2.0) == []
    assert taken(one) == Settled()


def test_storage_that_refuses_stops_nothing() -> None:
    """The reason is there for whoever asks."""
    one = deployment(replace(at_five(), hyper={"checkpoint_every": 2}))
    deployed(one)
    taken(one)
    for pnode in one.hosts:
        one.handle(report(pnode, 6), 2.0)
    one.handle(SaveFailed(A, SESSION, FIRST, 6, "the disk is full"), 3.0)
    assert "the disk is full" in one.checkpoints.trouble
    one.handle(ManifestFailed(SESSION, FIRST, 6, "never mind"), 3.0)
    for pnode in one.hosts:
        one.handle(report(pnode, 7), 4.0)
    assert one.trainer.done == 7
    assert taken(one) is None


def test_a_lost_message_is_found_by_what_pnodes_say_and_the_step_fed_again() -> None:
    """They have nothing to do, and the step is not done."""
    one = deployment(at_five())
    deployed(one)
    taken(one)
    one.handle(BatchRead(SESSION, FIRST, 6, tokens(7, 6, 4, 4)), 1.0)
    fed: list[Command] = []
    for half in range(1, 8):
        for name in "ab":
            fed += one.handle(standing(name), 1.0 + half / 2)
    hops = [(c.hop.step, c.hop.attempt) for c in fed if isinstance(c, SendHop)]
    assert hops == [(6, 1)] * 4
    assert taken(one) is None


def test_a_pnode_that_is_gone_from_the_heartbeats_ends_it() -> None:
    """One that takes no part is nobody's business."""
    one = deployment(at_five())
    deployed(one)
    taken(one)
    one.handle(Standing(info("a"), None), 9.0)
    one.handle(standing("z"), 9.0)
    assert taken(one) is None
    one.handle(Tick(), 10.0)
    outcome = taken(one)
    assert isinstance(outcome, GiveUp)
    assert outcome.without == A


def test_an_adopted_deployment_goes_on_where_it_was() -> None:
    """After the last decision; or, if there was none, with its deploys."""
    last = Decision(SESSION, FIRST, 6, False, 0.1, 1.0, 1.0, 2.5, 1.0, 1.0, SCALER, save=True)
    one = deployment(at_five())
    commands = one.adopt(Found(TWO, last, 4), 2.0)
    assert (one.trains, one.trainer.done, kinds(commands)) == (True, 6, [Decision])
    assert one.validation.first_attempt == 4
    assert one.checkpoints.deadline() == 4.0, "the checkpoint that the decision asked for is waited for"
    fresh = deployment(at_five())
    assert kinds(fresh.adopt(Found(TWO, None, 4), 2.0)) == [Deploy, Deploy]
    deployed(fresh)
    assert taken(fresh) == Begun()
    fed = fresh.handle(BatchRead(SESSION, FIRST, 6, tokens(7, 6, 4, 4)), 3.0)
    assert {c.hop.attempt for c in fed if isinstance(c, SendHop)} == {4}


@pytest.mark.parametrize("alone", [True, False])
def test_a_run_that_has_ended_early_is_adopted_as_such(alone: bool) -> None:
    """Its end was written down, its last checkpoint not yet: no step after it is fed."""
    fields = {"validate_every": 2, "patience": 1, "checkpoint_every": 0}
    one = deployment(replace(record(20, **fields), validation=ValidationRecord(8, 6, 1.0)), alone=alone)
    last = Decision(SESSION, FIRST, 8, False, 0.1, 1.0, 1.0, 2.5, 1.0, 1.0, SCALER)
    commands = one.adopt(Found(TWO, last, 4), 2.0)
    assert one.ends_early
    assert max((c.step for c in commands if isinstance(c, ReadBatch)), default=8) == 8
    if alone:
        for step in (6, 7, 8):
            commands = one.handle(StepDone(A, SESSION, FIRST, step, 1.0, 1.0, False, 0.1, 1.0, SCALER), 3.0)
    assert {c.message for c in commands if isinstance(c, Publish) and isinstance(c.message, Save)} == {Save(SESSION, FIRST, 8)}
    one.handle(written(8), 4.0)
    assert taken(one) == Settled()


def test_a_pnode_that_decides_alone_and_went_on_before_it_was_validated_ends_the_deployment() -> None:
    """An earlier leader fed it, and what came of the validation is not known."""
    one = deployment(record(20, validate_every=2, checkpoint_every=0), alone=True)
    last = Decision(SESSION, FIRST, 2, False, 0.1, 1.0, 1.0, 2.5, 1.0, 1.0, SCALER)
    one.adopt(Found((info("a"),), last, 4), 2.0)
    assert taken(one) is None
    one.handle(StepDone(A, SESSION, FIRST, 3, 1.0, 1.0, False, 0.1, 1.0, SCALER), 3.0)
    assert taken(one) == GiveUp("a PNode went on to step 3 before step 2 was validated")


def test_a_step_that_was_done_before_everyone_is_deployed_again_waits() -> None:
    """A PNode that decides alone says it again; until then it trains on nothing, and no checkpoint of a passed step is asked for."""
    done = StepDone(A, SESSION, FIRST, 6, 2.5, 1.0, False, 0.1, 1.0, SCALER)
    one = deployment(at_five(), alone=True)
    assert kinds(one.adopt(Found((info("a"),), None, 1), 2.0)) == [Deploy]
    assert one.handle(done, 2.1) == []
    deployed(one)
    assert (taken(one), one.checkpoints.wanted) == (Begun(), None)
    one.handle(done, 2.3)
    assert one.trainer.done == 6


def test_a_decision_that_only_a_pnode_knows_is_taken_over() -> None:
    """An earlier leader sent it, and it came late."""
    last = Decision(SESSION, FIRST, 6, False, 0.1, 1.0, 1.0, 2.5, 1.0, 1.0, SCALER)
    one = deployment(at_five())
    one.handle(standing("a", last=last), 0.5)
    assert one.trainer.done == 5, "not before it trains"
    deployed(one)
    taken(one)
    assert kinds(one.handle(standing("a", last=last), 2.0)) == [Decision]
    assert one.trainer.done == 6


def test_an_outcome_that_nobody_took_is_a_bug() -> None:
    """The session must decide."""
    one = deployment(at_five())
    deployed(one)
    with pytest.raises(InvariantError):
        one.validate()


def test_a_checkpoint_waits_for_the_word_that_its_steps_are_done() -> None:
    """Going back to it would leave a gap in the log, for a `StepDone` may be lost; so its part is asked for again."""
    one = deployment(at_five(), alone=True)
    deployed(one)
    taken(one)
    saved = Saved(A, SESSION, FIRST, 7, part(A, SESSION, 7), SCALER)
    six, seven = (StepDone(A, SESSION, FIRST, step, 1.0, 1.0, False, 0.1, 1.0, SCALER) for step in (6, 7))
    assert one.handle(saved, 1.0) == []
    one.handle(seven, 2.0)
    assert one.handle(saved, 2.0) == []
    one.handle(six, 2.5)
    assert [c.message for c in one.handle(Tick(), 3.0) if isinstance(c, Publish)] == [Save(SESSION, FIRST, 7)]
    (manifest,) = one.handle(saved, 4.0)
    assert isinstance(manifest, WriteManifest)
    assert (manifest.step, one.trainer.done) == (7, 7)


def test_the_kernel_names_every_kind_of_device_once() -> None:
    """Bits are promised for the same ones."""
    one = deployment(alone=True)
    deployed(one)
    state: dict[str, int | float] = {"updates": 0, "loss_scale": 1.0, "good_steps": 0, "dynamic": False}
    (command,) = one.handle(Saved(A, SESSION, FIRST, 0, part(A, SESSION, 0), state), 1.0)
    assert isinstance(command, WriteManifest)
    assert command.kernel == "numpy on cpu"
