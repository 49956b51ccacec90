"""One session: events in, commands out, against PNodes that follow the protocol. Placing, feeding, numbers, and the table of states."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from dcnr.bus.messages import (
    Decision,
    Deploy,
    Deployed,
    Failed,
    Hosted,
    Loss,
    Refused,
    Saved,
    SaveFailed,
    StepMetrics,
    StepReport,
    Undeploy,
)
from dcnr.ids import Epoch, PNodeId
from dcnr.orchestrator.commands import Publish, SendHop
from dcnr.orchestrator.events import (
    BatchFailed,
    BatchRead,
    Draining,
    Lost,
    ManifestFailed,
    ManifestWritten,
    Offered,
    RebalanceSession,
    SessionEvent,
    Standing,
    Tick,
)
from dcnr.orchestrator.session import Session
from dcnr.orchestrator.state import TRANSITIONS, CheckpointRecord, SessionState
from tests.orchestrator.fakes import SESSION, graph, info, part, record
from tests.orchestrator.story import FIRST, ONE, SETTINGS, START, SUSPEND, THREE, TWO, A, PNodes, S, Story, nothing, tokens, trained


@pytest.mark.parametrize("pnodes", [ONE, TWO, THREE])
def test_a_session_goes_from_its_seed_to_done(pnodes: PNodes) -> None:
    """Every state in order, step 0 and the last step saved, every step measured once, everyone let go."""
    story = trained(pnodes)
    assert story.states == [("waiting", 0), ("deploying", 0), ("running", 0), ("done", 4)]
    assert [row.step for row in story.measured(StepMetrics)] == [1, 2, 3, 4]
    assert [c.step for c in story.session.record.checkpoints] == [0, 4]
    assert len(story.sent(Undeploy)) == len(pnodes)
    assert story.pnodes.hosted == {}
    assert (story.session.record.step, story.session.record.loss) == (4, story.measured(StepMetrics)[-1].loss)


def test_losses_do_not_depend_on_placement() -> None:
    """One, two and three PNodes: the same numbers to the last bit, whoever decides."""
    runs = [trained(pnodes).measured(StepMetrics) for pnodes in (ONE, TWO, THREE)]
    rows = [[(r.step, r.loss, r.lr, r.loss_scale, r.skipped) for r in run] for run in runs]
    assert rows[0] == rows[1] == rows[2]
    assert len({loss for _, loss, _, _, _ in rows[0]}) > 1


def test_hops_carry_rows_weight_and_slots() -> None:
    """Ids for the embedder, then targets for the cost, micro-batch by micro-batch; the weight counts the whole step."""
    story = trained(TWO, steps=1)
    hops = [command for command in story.commands if isinstance(command, SendHop)]
    assert [(c.hop.step, c.hop.micro, c.hop.source_slot, c.hop.targets) for c in hops] == [
        (1, 0, 0, (("embed", 0),)), (1, 0, 1, (("loss", 1),)), (1, 1, 0, (("embed", 0),)), (1, 1, 1, (("loss", 1),)),
    ]  # fmt: skip
    assert {c.hop.weight for c in hops if c.hop.source_slot == 1} == {1 / 16}
    batch = tokens(7, 1, 4, 4)
    np.testing.assert_array_equal(hops[2].payload, batch[2:, :-1])
    np.testing.assert_array_equal(hops[3].payload, batch[2:, 1:])
    assert hops[0].hop.shape == (2, 4)
    assert hops[0].hop.dtype == "int64"


def test_deploy_carries_everything_a_pnode_needs(story: Story) -> None:
    """Each host gets the same deploy, with the hyper-parameters and scaler fields it will decide and update by."""
    story.lose = lambda event: isinstance(event, Deployed)
    story.tell(START, Offered(TWO))
    subjects = [subject for subject, _ in story.sent(Deploy)]
    assert subjects == ["dcnr.pnode.a.cmd", "dcnr.pnode.b.cmd"]
    deploy = story.sent(Deploy)[0][1]
    assert isinstance(deploy, Deploy)
    assert (deploy.epoch, deploy.step, deploy.checkpoint, deploy.decides, deploy.peers) == (1, 0, None, False, TWO)
    assert set(deploy.assignment) == {node.id for node in graph().nodes}
    assert deploy.state == {"updates": 0, "loss_scale": 1.0, "good_steps": 0, "dynamic": False}


def test_deploy_is_repeated_every_two_seconds_to_those_who_have_not_answered(story: Story) -> None:
    """A lost answer costs two seconds, not the session."""
    story.lose = lambda event: isinstance(event, Deployed) and event.pnode == "b"
    story.tell(START, Offered(TWO))
    assert story.session.deadline() == pytest.approx(2.02)
    assert story.tell(Tick()) == []
    story.now = 2.02
    story.lose = nothing
    repeated = story.tell(Tick())[0]
    assert isinstance(repeated, Publish)
    assert (repeated.subject, type(repeated.message)) == ("dcnr.pnode.b.cmd", Deploy)
    assert story.state is S.DONE


def test_a_refusal_makes_the_session_wait_with_the_numbers(story: Story) -> None:
    """A later offer is tried with the next epoch; who takes no part in that one lets go."""
    story.lose = lambda event: isinstance(event, Deployed)
    story.tell(START, Offered(TWO), Refused(PNodeId("b"), SESSION, Epoch(1), "needs 3 GiB, has 1 GiB"))
    assert (story.state, story.session.record.reason) == (S.WAITING, "PNode b refused: needs 3 GiB, has 1 GiB")
    assert story.sent(Undeploy) == []
    story.lose = nothing
    story.tell(Offered((info("b"), info("c"))))
    assert story.sent(Undeploy)[0] == ("dcnr.pnode.a.cmd", Undeploy(SESSION, Epoch(1)))
    assert (story.state, story.session.record.epoch) == (S.DONE, 2)


def test_a_session_waits_for_as_many_pnodes_as_it_wants() -> None:
    """The reason says how many; it is told once, and the session goes on when they are there."""
    story = Story(record(pnodes=2))
    story.tell(START, Offered(ONE), Offered(ONE))
    assert "needs 2 PNodes and 1 can take work" in story.session.record.reason
    assert story.states == [("waiting", 0), ("waiting", 0)]
    story.tell(Offered(THREE))
    assert story.state is S.DONE
    assert {subject for subject, _ in story.sent(Deploy)} == {"dcnr.pnode.a.cmd", "dcnr.pnode.b.cmd"}


def test_a_network_that_fits_nowhere_waits_and_says_what_it_needs(story: Story) -> None:
    """The numbers of placement reach the user."""
    story.tell(START, Offered((info("a", memory=100),)))
    assert story.state is S.WAITING
    assert "small" in story.session.record.reason or "embed" in story.session.record.reason


def test_an_overflow_skips_the_step_everywhere_and_halves_the_scale() -> None:
    """Counted as a step, not as an update."""
    story = Story(record(steps=3, loss_scale=8.0), overflow=frozenset({2}))
    story.tell(START, Offered(TWO))
    decisions = [message for _, message in story.sent(Decision)]
    assert [(d.step, d.skip, d.state["updates"], d.state["loss_scale"]) for d in decisions if isinstance(d, Decision)] == [
        (1, False, 1, 8.0), (2, True, 1, 4.0), (3, False, 2, 4.0),
    ]  # fmt: skip
    assert [(row.loss_scale, row.skipped) for row in story.measured(StepMetrics)] == [(8.0, False), (8.0, True), (4.0, False)]


def test_a_repeated_report_of_a_decided_step_gets_the_decision_again() -> None:
    """A PNode that missed the decision is not left behind."""
    story = Story(record(steps=50))
    story.lose = lambda event: isinstance(event, BatchRead) and event.step > 2
    story.tell(START, Offered(TWO))
    decision = story.sent(Decision)[-1][1]
    again = StepReport(PNodeId("a"), SESSION, Epoch(1), 2, 0, {}, True, ())
    assert story.tell(again) == [Publish("dcnr.net.small.step", decision)]  # type: ignore[arg-type]
    assert story.session.step == 2


def test_lost_losses_are_taken_from_the_reports() -> None:
    """The loss of a step is complete although no `Loss` message came, as long as the window lets the step be fed."""
    story = Story(record(micro_batches=2))
    story.lose = lambda event: isinstance(event, Loss)
    story.tell(START, Offered(TWO))
    assert [row.loss for row in story.measured(StepMetrics)] == [row.loss for row in trained(TWO).measured(StepMetrics)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("pnodes", [ONE, THREE])
def test_order_and_repetition_of_messages_change_no_number(pnodes: PNodes, seed: int) -> None:
    """Reports, batches and manifests in any order, some of them twice: every step once, with the losses of the quiet run."""
    quiet = trained(pnodes, steps=6, micro_batches=4, checkpoint_every=2)
    wild = Story(record(steps=6, micro_batches=4, checkpoint_every=2), rng=np.random.default_rng(seed))
    wild.tell(START)
    wild.tell(Offered(pnodes))
    assert wild.state is S.DONE
    numbers = [[(row.step, row.loss, row.grad_norm) for row in story.measured(StepMetrics)] for story in (wild, quiet)]
    if pnodes == ONE:  # a step's word may be overtaken by the next one's; what comes is right
        assert set(numbers[0]) <= set(numbers[1])
    else:
        assert numbers[0] == numbers[1]
    assert wild.session.record.checkpoints[-1] == quiet.session.record.checkpoints[-1]


def test_micro_batches_in_flight_are_bounded() -> None:
    """Segments + 1 of them; a loss opens the window by one."""
    story = Story(record(steps=50, micro_batches=4))
    kept: list[SessionEvent] = []

    def keep(event: SessionEvent) -> bool:
        kept.extend([event] if isinstance(event, Loss) else [])
        return isinstance(event, Loss | StepReport)

    story.lose = keep
    story.tell(START, Offered(TWO))
    fed = {(command.hop.step, command.hop.micro) for command in story.commands if isinstance(command, SendHop)}
    assert fed == {(1, 0), (1, 1), (1, 2)}
    story.tell(kept[0])
    assert len([command for command in story.commands if isinstance(command, SendHop)]) == 8


def test_a_pnode_that_decides_is_fed_three_steps_ahead() -> None:
    """No round trip between steps; no loss message is awaited."""
    story = Story(record(steps=50))
    story.lose = lambda event: not isinstance(event, BatchRead | Deployed | Saved | ManifestWritten)
    story.tell(START, Offered(ONE))
    assert {command.hop.step for command in story.commands if isinstance(command, SendHop)} == {1, 2, 3}


def test_step_times_are_measured_between_completions(story: Story) -> None:
    """tokens/s is the step's tokens over that time."""
    story.tell(START, Offered(TWO))
    for row in story.measured(StepMetrics):
        assert row.step_ms > 0
        assert row.tokens_per_s == pytest.approx(16 / row.step_ms * 1000)


def everything() -> Iterator[SessionEvent]:
    """One of each event, of the present epoch."""
    a, one = A, FIRST
    yield from (
        START,
        SUSPEND,
        RebalanceSession(3, SESSION),
        Offered(ONE),
        Offered(THREE),
        Offered(()),
        Lost(a, "gone"),
        Draining(a),
        Tick(),
    )
    for hosted in (None, Hosted(SESSION, one, 0, 1, 1), Hosted(SESSION, Epoch(9), 0, 1, 1)):
        yield Standing(info("a"), hosted)
    yield from (
        Deployed(a, SESSION, one, 0, 1),
        Refused(a, SESSION, one, "full"),
        Refused(a, SESSION, one, "bad sha256", damaged=True),
        SaveFailed(a, SESSION, one, 0, "the disk is full"),
        Failed(a, SESSION, one, "the device is lost", "", world=True),
        Loss(a, SESSION, one, 1, 0, graph().nodes[-1].id, 0, 1.0),
        Failed(a, SESSION, one, "bad", ""),
    )
    yield from (StepReport(a, SESSION, one, 1, 0, {}, True, ()), Saved(a, SESSION, one, 0, part(a, SESSION, 0), None))
    yield from (BatchRead(SESSION, one, 1, tokens(0, 1, 4, 4)), BatchFailed(SESSION, one, 1, "gone"))
    yield from (ManifestWritten(SESSION, one, CheckpointRecord(0, "k", {})), ManifestFailed(SESSION, one, 0, "full"))


def in_state(state: SessionState) -> Story:
    """A story that has come to `state`."""
    story = Story(record(steps=50) if state is not S.DONE else record(steps=1))
    if state in (S.DEPLOYING, S.SUSPENDED, S.FAILED):
        story.lose = lambda event: isinstance(event, Deployed)
    elif state is not S.DONE:
        story.lose = lambda event: isinstance(event, StepReport)
    match state:
        case S.CREATED:
            return story
        case S.ADOPTING:
            story.tell(START, Offered(TWO))
            left = story.session
            story.session = Session.taken_over(left.record, graph(), left.assignment, SETTINGS, story.now)
        case S.WAITING:
            story.tell(START)
        case S.SUSPENDED | S.SUSPENDING:
            story.tell(START, Offered(TWO))
            story.tell(SUSPEND)
        case S.FAILED:
            story.tell(START, Offered(TWO), Failed(PNodeId("a"), SESSION, Epoch(1), "bad", ""))
        case _:
            story.tell(START, Offered(TWO))
    assert story.state is state
    return story


@pytest.mark.parametrize("state", list(SessionState))
@pytest.mark.parametrize("event", list(everything()), ids=lambda event: type(event).__name__)
def test_every_event_in_every_state_keeps_to_the_table(state: SessionState, event: SessionEvent) -> None:
    """No event breaks the machine, and states change only as the table says."""
    story = in_state(state)
    story.lose = lambda _event: True
    story.commands.clear()
    story.tell(event)
    path = [str(state), *(told for told, _ in story.states)]
    assert all(after == before or after in TRANSITIONS[SessionState(before)] for before, after in pairwise(path)), path
