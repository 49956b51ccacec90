"""One PNode: deploys, epochs, memory, turns and heartbeats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

import numpy as np
import pytest

from dcnr.agents.commands import Abort, Beat, Command, Evict, GiveWay, Install, Pass, Prepare, SendReport, Settle, Snapshot, Upload
from dcnr.agents.events import (
    Aborted,
    Applied,
    HopArrived,
    Installed,
    JobFailed,
    NameHeard,
    PassDone,
    Prepared,
    SetupFailed,
    SetupRefused,
    SnapshotTaken,
    Stop,
    Tick,
    Told,
    Uploaded,
    UploadFailed,
)
from dcnr.agents.hosted import State
from dcnr.agents.plan import make_plan
from dcnr.agents.pnode import HEARTBEAT_EVERY, QUEUED, SAME_AGE, PNode
from dcnr.agents.telemetry import Reason, Telemetry
from dcnr.bus.messages import (
    TRAINER,
    Complete,
    Decision,
    Deploy,
    Deployed,
    Failed,
    Heartbeat,
    Hop,
    PNodeInfo,
    Refused,
    Save,
    Saved,
    SavedPart,
    SaveFailed,
    Undeploy,
)
from dcnr.ids import Epoch, NodeId, PNodeId, SessionId
from dcnr.optim.decide import ScalerState
from tests.agents.tiny import NETWORK, SEQ, SESSION, A, deploy_of, graph_of

GIB = 1 << 30
DEPLOY = deploy_of({node.id: A for node in graph_of().nodes})
NEWER = replace(DEPLOY, epoch=Epoch(2))
PLAN = make_plan(DEPLOY, A)


def info(incarnation: str = "b", memory: int = GIB) -> PNodeInfo:
    """A process with the name `a`."""
    return PNodeInfo(A, incarnation, "host", "numpy", "cpu", memory, 0, 1, 1, "0")


@pytest.fixture
def pnode() -> Iterator[PNode]:
    """A PNode with plenty of memory."""
    machine = PNode(info(), Telemetry(), now=0.0)
    yield machine
    machine.validate()


def dropped(pnode: PNode) -> dict[Reason, int]:
    """What had no effect."""
    return {**pnode.telemetry.dropped}


def install(pnode: PNode, deploy: Deploy = DEPLOY) -> list[Command]:
    """Deploy, prepare, install."""
    assert pnode.handle(Told(deploy), 0.0) == [Prepare(deploy)]
    assert pnode.handle(Prepared(deploy, PLAN), 0.0) == [Install(deploy, PLAN, {})]
    return pnode.handle(Installed(deploy.session, deploy.epoch, None), 0.0)


def feed(pnode: PNode, step: int, micro: int, session: SessionId = SESSION, epoch: Epoch = DEPLOY.epoch, attempt: int = 0) -> list[Command]:
    """Ids and targets of a micro-batch of three rows."""
    commands = []
    for slot, target in enumerate((("embedder", 0), ("loss", 1))):
        payload = np.zeros((3, SEQ), np.int64)
        hop = Hop(
            NETWORK, session, epoch, step, micro, attempt, "fwd", TRAINER, slot, ((NodeId(target[0]), target[1]),), PNodeId("trainer"),
            "int64", payload.shape, 0.1 * slot,
        )  # fmt: skip
        commands += pnode.handle(HopArrived(hop, payload), 0.0)
    return commands


def done(job: Command) -> PassDone:
    """The answer to a pass."""
    assert isinstance(job, Pass)
    return PassDone(job.session, job.epoch, job.segment, job.step, job.micro, job.attempt, (), (), ())


def decision(step: int) -> Decision:
    """Apply."""
    return Decision(SESSION, DEPLOY.epoch, step, False, 0.1, 1.0, 1.0, 2.0, 1.0, 1.0, asdict(ScalerState(updates=step)))


def reports(commands: list[Command]) -> list[object]:
    """What is said."""
    return [command.report for command in commands if isinstance(command, SendReport)]


# -- deploy ----------------------------------------------------------------------------------------------------------------


def test_a_deploy_is_prepared_installed_and_answered(pnode: PNode) -> None:
    """And answered again when it is repeated."""
    answer = SendReport(NETWORK, Deployed(A, SESSION, DEPLOY.epoch, 0, PLAN.bytes))
    assert install(pnode) == [answer]
    assert pnode.handle(Told(DEPLOY), 1.0) == [answer]
    assert pnode.used == PLAN.bytes
    assert pnode.telemetry.vnodes == PLAN.node_bytes


def test_a_deploy_that_is_repeated_while_it_is_carried_out_changes_nothing(pnode: PNode) -> None:
    """The answer comes when it is done."""
    pnode.handle(Told(DEPLOY), 0.0)
    assert pnode.handle(Told(DEPLOY), 0.0) == []


def test_a_newer_epoch_replaces_an_older_one(pnode: PNode) -> None:
    """The old part goes before the new one is prepared; results of the old one change nothing."""
    install(pnode)
    assert pnode.handle(Told(NEWER), 0.0) == [Evict(SESSION, DEPLOY.epoch), Prepare(NEWER)]
    assert pnode.handle(Installed(SESSION, DEPLOY.epoch, None), 0.0) == []
    assert pnode.handle(Prepared(DEPLOY, PLAN), 0.0) == []
    assert pnode.handle(Told(DEPLOY), 0.0) == []
    assert dropped(pnode) == {"stale": 3}
    assert pnode.handle(Prepared(NEWER, PLAN), 0.0) == [Install(NEWER, PLAN, {})]


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    """Nothing is kept, and asking again is refused again."""
    small = PNode(info(memory=1000), Telemetry(), now=0.0)
    for _ in range(2):
        small.handle(Told(DEPLOY), 0.0)
        evict, said = small.handle(Prepared(DEPLOY, PLAN), 0.0)
        assert evict == Evict(SESSION, DEPLOY.epoch)
        (refused,) = reports([said])
        assert isinstance(refused, Refused)
        assert not refused.damaged
        assert refused.reason == f"a has 1000 B free of 1000 B, and its part of 'run' (15 VNodes) needs {PLAN.bytes / 1024:.1f} KiB"
    assert small.sessions == {}
    small.validate()


def test_two_sessions_share_the_memory() -> None:
    """The second one is refused where only one fits."""
    pnode = PNode(info(memory=int(PLAN.bytes * 1.5)), Telemetry(), now=0.0)
    install(pnode)
    other = replace(DEPLOY, session=SessionId("other"))
    pnode.handle(Told(other), 0.0)
    (refused,) = reports(pnode.handle(Prepared(other, PLAN), 0.0))
    assert isinstance(refused, Refused)
    pnode.validate()


def test_undeploy_lets_go_for_good(pnode: PNode) -> None:
    """A late deploy of that epoch does not bring it back; a newer one does."""
    install(pnode)
    assert pnode.handle(Told(Undeploy(SESSION, DEPLOY.epoch)), 0.0) == [Evict(SESSION, DEPLOY.epoch)]
    assert pnode.handle(Told(Undeploy(SESSION, DEPLOY.epoch)), 0.0) == []
    assert pnode.handle(Told(DEPLOY), 0.0) == []
    assert (pnode.used, pnode.telemetry.vnodes) == (0, {})
    assert feed(pnode, 1, 0) == []
    assert dropped(pnode) == {"stale": 3}
    assert pnode.handle(Told(NEWER), 0.0) == [Prepare(NEWER)]


def test_an_undeploy_of_an_older_epoch_leaves_the_newer_one(pnode: PNode) -> None:
    """A late message about the past."""
    install(pnode, NEWER)
    assert pnode.handle(Told(Undeploy(SESSION, DEPLOY.epoch)), 0.0) == []
    assert SESSION in pnode.sessions


def test_a_deploy_that_fails_is_said(pnode: PNode) -> None:
    """A file that does not load; and whether it was the world's fault."""
    pnode.handle(Told(DEPLOY), 0.0)
    commands = pnode.handle(SetupFailed(SESSION, DEPLOY.epoch, "no room", "trace", True), 0.0)
    assert reports(commands) == [Failed(A, SESSION, DEPLOY.epoch, "no room", "trace", world=True)]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_deploy_that_finds_no_storage_is_refused(pnode: PNode, damaged: bool) -> None:
    """While it is prepared, or while it is installed: nothing of it is kept, and it can be asked for again."""
    for prepared in (False, True):
        pnode.handle(Told(DEPLOY), 0.0)
        if prepared:
            pnode.handle(Prepared(DEPLOY, PLAN), 0.0)
        assert pnode.handle(SetupRefused(SESSION, DEPLOY.epoch, "no such folder", damaged), 0.0) == [
            Evict(SESSION, DEPLOY.epoch),
            SendReport(NETWORK, Refused(A, SESSION, DEPLOY.epoch, "no such folder", damaged)),
        ]
        assert (pnode.used, pnode.telemetry.vnodes, pnode.sessions) == (0, {}, {})


def test_what_is_said_to_strangers_is_counted(pnode: PNode) -> None:
    """Decisions, completions, saves and hops of sessions that were never here."""
    pnode.handle(Told(decision(1)), 0.0)
    pnode.handle(Told(Complete(SESSION, DEPLOY.epoch, 1)), 0.0)
    pnode.handle(Told(Save(SESSION, DEPLOY.epoch, 0)), 0.0)
    feed(pnode, 1, 0)
    assert dropped(pnode) == {"unknown": 5}


# -- copies ----------------------------------------------------------------------------------------------------------------

AT_4 = replace(NEWER, step=4, checkpoint="checkpoints/run/0000000004/manifest.json")
TENSORS = {"up.weight": np.zeros(3, np.float32)}


def copied(pnode: PNode, step: int, epoch: Epoch = DEPLOY.epoch) -> None:
    """A copy of the state after a step was taken."""
    pnode.handle(Told(Save(SESSION, epoch, step)), 0.0)
    pnode.handle(SnapshotTaken(SESSION, epoch, step, TENSORS, ScalerState()), 0.0)


def kept_for(pnode: PNode, deploy: Deploy) -> object:
    """What an install of a deploy need not read."""
    pnode.handle(Told(deploy), 0.0)
    (install_it,) = pnode.handle(Prepared(deploy, PLAN), 0.0)
    assert isinstance(install_it, Install)
    return install_it.kept


def test_a_newer_epoch_begins_with_the_copy_of_exactly_its_step(pnode: PNode) -> None:
    """Of another step, or of a training that differs, nothing is taken over."""
    for deploy, kept in (
        (replace(NEWER, step=0), TENSORS),
        (AT_4, {}),
        (replace(NEWER, step=0, seed=8), {}),
        (replace(NEWER, step=0, hyper={"lr": 0.5}), {}),
    ):
        install(pnode)
        copied(pnode, 0)
        assert kept_for(pnode, deploy) == kept
        pnode.handle(Told(Undeploy(SESSION, deploy.epoch)), 0.0)
        pnode = PNode(info(), Telemetry(), now=0.0)


def test_a_copy_is_handed_on_from_epoch_to_epoch(pnode: PNode) -> None:
    """Through an install, through a deploy that is replaced before it is carried out, and through one that failed."""
    install(pnode)
    copied(pnode, 0)
    assert kept_for(pnode, NEWER) is TENSORS
    third, fourth, fifth = (replace(DEPLOY, epoch=Epoch(epoch)) for epoch in (3, 4, 5))
    assert kept_for(pnode, third) is TENSORS
    assert reports(pnode.handle(Installed(SESSION, third.epoch, TENSORS), 0.0))
    assert kept_for(pnode, fourth) is TENSORS
    pnode.handle(SetupFailed(SESSION, fourth.epoch, "no room", "trace", True), 0.0)
    assert kept_for(pnode, fifth) is TENSORS


def test_a_complete_checkpoint_makes_older_copies_useless(pnode: PNode) -> None:
    """After `Complete` of step 4 a rollback to step 0 reads storage."""
    install(pnode)
    copied(pnode, 0)
    pnode.handle(Told(Complete(SESSION, DEPLOY.epoch, 4)), 0.0)
    assert kept_for(pnode, NEWER) == {}


def test_undeploy_forgets_copies(pnode: PNode) -> None:
    """The session is over here."""
    install(pnode)
    copied(pnode, 0)
    pnode.handle(Told(Undeploy(SESSION, DEPLOY.epoch)), 0.0)
    assert kept_for(pnode, NEWER) == {}


# -- work ------------------------------------------------------------------------------------------------------------------


def test_only_two_jobs_are_at_the_compute_thread(pnode: PNode) -> None:
    """The next one follows when one is done, and the step is settled right behind its last pass."""
    install(pnode)
    jobs = [command for step in (1, 2) for micro in (0, 1) for command in feed(pnode, step, micro)]
    assert [(type(job), getattr(job, "micro", None)) for job in jobs] == [(Pass, 0), (Pass, 1)]
    assert len(jobs) == QUEUED
    assert pnode.handle(done(jobs[0]), 0.0) == [Settle(SESSION, DEPLOY.epoch, 1)]
    (following,) = pnode.handle(done(jobs[1]), 0.0)
    assert isinstance(following, Pass)
    assert following.step == 2


def test_sessions_take_turns(pnode: PNode) -> None:
    """With work for both, one job of each is queued."""
    other = replace(DEPLOY, session=SessionId("other"))
    install(pnode)
    install(pnode, other)
    jobs = [*feed(pnode, 1, 0), *feed(pnode, 1, 1), *feed(pnode, 1, 0, other.session), *feed(pnode, 1, 1, other.session)]
    following = [*pnode.handle(done(jobs[0]), 0.0), *pnode.handle(done(jobs[1]), 0.0)]
    assert {getattr(job, "session", None) for job in following} == {SESSION, other.session}


def test_jobs_of_a_session_that_is_gone_still_count_as_done(pnode: PNode) -> None:
    """The compute thread answers them, and is free again."""
    install(pnode)
    jobs = [*feed(pnode, 1, 0), *feed(pnode, 1, 1)]
    pnode.handle(Told(Undeploy(SESSION, DEPLOY.epoch)), 0.0)
    for job in jobs:
        assert pnode.handle(done(job), 0.0) == []
    install(pnode, NEWER)
    assert len([*feed(pnode, 1, 0, epoch=NEWER.epoch), *feed(pnode, 1, 1, epoch=NEWER.epoch)]) == QUEUED


def test_a_failed_job_fails_its_session(pnode: PNode) -> None:
    """With the message of the node."""
    install(pnode)
    feed(pnode, 1, 0)
    commands = pnode.handle(JobFailed(SESSION, DEPLOY.epoch, "node 'up': ValueError: no", "trace", False), 0.0)
    assert reports(commands) == [Failed(A, SESSION, DEPLOY.epoch, "node 'up': ValueError: no", "trace")]
    assert pnode.handle(Told(Undeploy(SESSION, DEPLOY.epoch)), 0.0) == [Evict(SESSION, DEPLOY.epoch)]


def test_a_checkpoint_goes_through(pnode: PNode) -> None:
    """Save, snapshot, upload, saved; an upload that fails is said, and the session goes on."""
    install(pnode)
    assert pnode.handle(Told(Save(SESSION, DEPLOY.epoch, 0)), 0.0) == [Snapshot(SESSION, DEPLOY.epoch, 0)]
    (upload,) = pnode.handle(SnapshotTaken(SESSION, DEPLOY.epoch, 0, {}, ScalerState()), 0.0)
    assert isinstance(upload, Upload)
    part = SavedPart("key", "00", 1, ())
    assert reports(pnode.handle(Uploaded(SESSION, DEPLOY.epoch, 0, part, None), 0.0)) == [Saved(A, SESSION, DEPLOY.epoch, 0, part, None)]
    (failed,) = reports(pnode.handle(UploadFailed(SESSION, DEPLOY.epoch, 2, "disk full"), 0.0))
    assert failed == SaveFailed(A, SESSION, DEPLOY.epoch, 2, "disk full")
    assert pnode.sessions[SESSION].state is State.STEPPING


def test_uploads_of_an_older_epoch_have_no_effect(pnode: PNode) -> None:
    """They end in a part that no manifest names."""
    install(pnode)
    pnode.handle(Told(NEWER), 0.0)
    assert pnode.handle(Uploaded(SESSION, DEPLOY.epoch, 0, SavedPart("key", "00", 1, ()), None), 0.0) == []
    assert pnode.handle(UploadFailed(SESSION, DEPLOY.epoch, 0, "disk full"), 0.0) == []


@pytest.mark.parametrize("event", [Applied(SESSION, DEPLOY.epoch, 1), Aborted(SESSION, DEPLOY.epoch, 1)])
def test_an_applied_or_forgotten_step_has_no_further_effect(pnode: PNode, event: Applied | Aborted) -> None:
    """The compute thread is free again, and that is all."""
    install(pnode)
    feed(pnode, 1, 0)
    assert pnode.handle(event, 0.0) == []


def test_a_step_that_is_begun_again_is_forgotten_before_it_is_computed(pnode: PNode) -> None:
    """In this order at the compute thread, and what was there already is answered first, without effect."""
    install(pnode)
    first = feed(pnode, 1, 0)
    assert [type(job) for job in first] == [Pass]
    again = feed(pnode, 1, 0, attempt=1)
    assert again == [Abort(SESSION, DEPLOY.epoch, 1)]
    (new,) = pnode.handle(done(first[0]), 0.0)
    assert isinstance(new, Pass)
    assert new.attempt == 1
    assert pnode.handle(Aborted(SESSION, DEPLOY.epoch, 1), 0.0) == []
    assert pnode.handle(done(new), 0.0) == []


# -- time ------------------------------------------------------------------------------------------------------------------


def test_a_heartbeat_is_due_at_once_and_every_half_second(pnode: PNode) -> None:
    """It says what is hosted."""
    assert pnode.deadline() == 0.0
    assert pnode.handle(Tick(), 0.0) == [Beat((), False, 0.0)]
    assert pnode.deadline() == HEARTBEAT_EVERY
    assert pnode.handle(Tick(), 0.2) == []
    install(pnode)
    (beat,) = pnode.handle(Tick(), 0.5)
    assert isinstance(beat, Beat)
    assert [(hosted.session, hosted.busy, hosted.work) for hosted in beat.hosted] == [(SESSION, False, 0)]


def test_a_heartbeat_says_who_has_something_to_do(pnode: PNode) -> None:
    """A job at work, a job answered, and a tensor on its way, each of its own session and epoch."""

    def standing(now: float, *sending: tuple[SessionId, Epoch]) -> list[tuple[bool, int]]:
        (beat,) = pnode.handle(Tick(frozenset(sending)), now)
        assert isinstance(beat, Beat)
        return [(hosted.busy, hosted.work) for hosted in sorted(beat.hosted, key=lambda hosted: hosted.session)]

    install(pnode, replace(DEPLOY, session=SessionId("another")))
    install(pnode)
    assert standing(0.0) == [(False, 0), (False, 0)]
    (job,) = feed(pnode, 1, 0)
    assert standing(1.0) == [(False, 0), (True, 0)]
    pnode.handle(done(job), 1.0)
    assert standing(2.0) == [(False, 0), (False, 1)]
    assert standing(3.0, (SESSION, DEPLOY.epoch)) == [(False, 0), (True, 1)]
    assert standing(4.0, (SESSION, Epoch(0))) == [(False, 0), (False, 1)]
    pnode.handle(Told(NEWER), 4.0)
    assert standing(5.0) == [(False, 0), (True, 0)]


def test_an_older_process_keeps_the_name(pnode: PNode) -> None:
    """We say good-bye, once, and take nothing new."""
    older = Heartbeat(info("c"), (), age=60.0)
    assert pnode.handle(NameHeard(older), 0.5) == [GiveWay(older.info), Beat((), True, 0.5)]
    assert pnode.handle(NameHeard(older), 0.6) == []
    assert pnode.handle(Told(DEPLOY), 0.7) == []


@pytest.mark.parametrize(
    "beat",
    [
        Heartbeat(info(), (), age=60.0),
        Heartbeat(info("a"), (), age=10.0 - SAME_AGE - 0.1),
        Heartbeat(info("a"), (), stopping=True, age=60.0),
    ],
    ids=["own", "younger", "stopping"],
)
def test_only_an_older_process_that_stays_is_given_way_to(pnode: PNode, beat: Heartbeat) -> None:
    """Neither our own heartbeats, nor a younger one, nor one that leaves: a restarted agent is not hindered."""
    assert pnode.handle(NameHeard(beat), 10.0) == []
    assert not pnode.stopping


@pytest.mark.parametrize("apart", [0.0, 0.1, 0.19, 0.21, 1.0, 50.0])
@pytest.mark.parametrize("late", [0.0, 0.05, 0.6])
@pytest.mark.parametrize("smaller", ["first", "second"])
def test_of_two_processes_with_one_name_exactly_one_stays(apart: float, late: float, smaller: str) -> None:
    """Started `apart` seconds, their first heartbeats heard `late`: never none or both in the end; well apart, it is the first one."""
    names = ("a", "b") if smaller == "first" else ("b", "a")
    infos = [info(name) for name in names]
    born = (100.0, 100.0 + apart)
    pnodes = [PNode(one, Telemetry(), at) for one, at in zip(infos, born, strict=True)]
    for sent, heard in ((born[1], born[1] + late), (born[1] + 1.0, born[1] + 1.001)):
        beats = [Heartbeat(infos[at], (), age=sent - born[at]) for at in range(2) if not pnodes[at].stopping]
        for beat in beats:
            for one in pnodes:
                one.handle(NameHeard(beat), heard)
    stopping = [one.stopping for one in pnodes]
    assert stopping == ([False, True] if apart > SAME_AGE or smaller == "first" else [True, False])


def test_stopping_says_good_bye_and_takes_nothing_new(pnode: PNode) -> None:
    """The last heartbeat."""
    assert pnode.handle(Stop(), 1.5) == [Beat((), True, 1.5)]
    assert pnode.handle(Told(DEPLOY), 0.0) == []
    assert dropped(pnode) == {"stale": 1}
