"""One session's life: placed, deployed, trained, checkpointed, suspended, resumed; and placed again when something breaks.

    created --start--> waiting --PNodes fit--> deploying --all deployed, step 0 saved--> running --last step saved--> done
                         ^ ^                       |                                      |  |
                         | +-lost, refused, stuck--+--<-- lost, stuck, to be moved -------+  | suspend
                         +--<--resume-- suspended <--saved, or lost -- suspending <----------+

    A new leader finds what is under way *adopting*: it goes on where it was (deploying, running, suspending), or, if PNodes are missing,
    it waits to be placed again (if it was to be suspended, it is suspended). Suspended or failed, at once: from any of these.

Rule 1: two remedies. A step that lost a message is fed again. For whatever else goes wrong, the session goes *back*: it waits, is placed on
the PNodes that are there, and is deployed in a new epoch from the newest checkpoint. PNodes that take part again are not told to let go.
Rule 2: an exception in a node fails the session at once; trouble of the world does when it comes a fourth time without a step done.
Rule 3: `Deploy` and `Save` are repeated every 2 s until they are answered; everything else is sent once or sent again on request.
Rule 4: reports and results of another epoch are dropped and counted; but a manifest that was written is a checkpoint.
Rule 5: whoever comes to rest lets go of every PNode. `record.step` is always that of the newest checkpoint (0: the seed).
Rule 6: a checkpoint that cannot be read is forgotten, and the next older one is gone back to; with the last one the session fails.
Rule 7: a session that is to move stops at a checkpoint that it asks for; one that can spread over more PNodes goes back to the one that
has just become complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dcnr.bus import subjects
from dcnr.bus.messages import Complete, Failed, PNodeInfo, Refused, Report, SessionMetrics, Undeploy
from dcnr.errors import DoesNotFit, InvariantError
from dcnr.ids import NEVER, Epoch, NodeId, PNodeId
from dcnr.network.graph import Graph
from dcnr.optim.hyper import Hyper
from dcnr.orchestrator.checkpoints import retained
from dcnr.orchestrator.commands import Command, Measured, Prune, Publish, Store
from dcnr.orchestrator.deployment import Begun, Deployment, Hopeless, RunEvent, Settled
from dcnr.orchestrator.doubts import Doubts
from dcnr.orchestrator.events import (
    BatchFailed,
    Draining,
    Lost,
    ManifestWritten,
    Offered,
    RebalanceSession,
    Result,
    SessionEvent,
    Standing,
    StartSession,
    SuspendSession,
    Tick,
)
from dcnr.orchestrator.failover import Adoption, Found
from dcnr.orchestrator.layout import deploy_of, divided_anew, homes_for, homes_in, named, plan_of, scaler_at, wider
from dcnr.orchestrator.state import ACTIVE, TRANSITIONS, UNDER_WAY, AssignmentRecord, SessionRecord, SessionState
from dcnr.orchestrator.validation import complete
from dcnr.orchestrator.watchdog import GiveUp
from dcnr.placement.assignment import Assignment

_S = SessionState


@dataclass(frozen=True, slots=True)
class Settings:
    """What all sessions of an orchestrator share: its name as a sender of hops, and the storage that PNodes load from and save to.

    `first_epoch`: the smallest epoch that this leader hands out, larger than any of an earlier leader's. `probe`: as in `Deploy`.
    """

    me: PNodeId
    storage: str
    first_epoch: Epoch = NEVER
    probe: str | None = None


class Session:
    """The machine of one session. `graph` is the prepared one, and known while the session is not at rest."""

    def __init__(self, record: SessionRecord, settings: Settings) -> None:
        self.record = record
        self.settings = settings
        self.graph: Graph | None = None
        self.run: Deployment | None = None
        self.adoption: Adoption | None = None
        self.assignment: AssignmentRecord | None = None
        """The newest: of the deployment, or of the one that a recovery starts from."""
        self.newest_epoch = record.epoch
        """The largest that is known of."""
        self.doubts = Doubts()
        self.fenced = 0
        self.read: frozenset[int] = frozenset()
        """Steps whose checkpoints are being read for text: they stay."""
        self._since = Epoch(record.epoch + 1)
        """The first epoch since it was started or resumed: manifests of older ones do not count."""
        self._suspends = False
        """It is to be suspended once it is adopted."""
        self._anew = False
        """It is to be divided without regard to where it was."""

    @classmethod
    def taken_over(
        cls, record: SessionRecord, graph: Graph | str | None, assignment: AssignmentRecord | None, settings: Settings, now: float
    ) -> Session:
        """The session as an earlier leader left it. `graph` is the reason, if there is none; None if the session is at rest."""
        record = record.with_checkpoints(record.checkpoints)
        if record.state is _S.WAITING and complete(record):  # its last manifest was written, and nobody heard of it
            record = replace(record, state=_S.DONE, reason="", recovers=False)
        session = cls(record, settings)
        if record.state not in UNDER_WAY:
            return session
        session._since = record.epoch
        if not isinstance(graph, Graph):
            session.record = replace(record, state=_S.FAILED, reason=graph or "its graph is not known")
            return session
        session.graph = graph
        session.assignment = assignment if assignment and assignment.epoch == record.epoch and homes_in(assignment, graph) else None
        if record.state is not _S.WAITING:
            session._look_for(now)
        return session

    @property
    def step(self) -> int:
        """Steps done."""
        return self.run.trainer.done if self.run else self.record.step

    @property
    def loss(self) -> float | None:
        """Of the last step done."""
        return self.run.trainer.loss if self.run and self.run.trainer.loss is not None else self.record.loss

    @property
    def reason(self) -> str:
        """Why it is where it is, or what holds it up."""
        trouble, validated = (self.run.checkpoints.trouble, self.run.validation.of_step) if self.run else ("", None)
        return trouble or self.record.reason or ("" if validated is None else f"validates step {validated}")

    @property
    def homes(self) -> dict[NodeId, PNodeId]:
        """Where its VNodes live; empty while no PNode holds it."""
        return homes_in(self.assignment, self.graph) if self.record.state in ACTIVE else {}

    @property
    def hosts(self) -> frozenset[PNodeId]:
        """The PNodes that take part in its deployment."""
        return frozenset(self.assignment.nodes.values()) if self.assignment and self.record.state in ACTIVE else frozenset()

    def uses(self, pnode: PNodeId, epoch: Epoch) -> bool:
        """Whether `pnode` rightly hosts a part of this session in `epoch`: now, or so that a recovery finds it there."""
        if self.run:
            return epoch == self.record.epoch and pnode in self.run.hosts
        state, assignment = self.record.state, self.assignment
        held = state is _S.ADOPTING or (state is _S.WAITING and self.record.recovers)
        return held and assignment is not None and epoch == assignment.epoch and pnode in assignment.nodes.values()

    def minds(self, pnode: PNodeId) -> bool:
        """Whether it wants to know where it stands on `pnode`."""
        return pnode in self.doubts.avoided or pnode in self.hosts

    def created(self) -> list[Command]:
        """Write down that the session exists."""
        return [Store(self.record), self._told()]

    def opening(self) -> list[Command]:
        """Tell what the change of leader made of it. What is looked for is not written down: the next leader would look for it too."""
        return [self._told()] if self.record.state is _S.ADOPTING else self.created()

    def objection(self, event: StartSession | SuspendSession | RebalanceSession, offered: Sequence[PNodeInfo] = ()) -> str | None:
        """Why the session cannot do what is asked now, if it cannot."""
        state, name = self.record.state, self.record.session
        match event:
            case StartSession(steps=steps):
                total = steps or self.record.steps
                if state in UNDER_WAY:
                    return f"session '{name}' is {state} already"
                done = event.checkpoint.step if event.checkpoint else 0
                at_end = done > total or complete(replace(self.record, step=done, steps=total))
                return f"session '{name}' has done step {done} of {total}; ask for more steps" if at_end else None
            case SuspendSession():
                return f"session '{name}' is {state}, so there is nothing to suspend" if state not in UNDER_WAY else None
            case RebalanceSession():
                if self.run is None or state is not _S.RUNNING:
                    return f"session '{name}' is {state}; only a running one can be divided anew"
                if self.run.moving:
                    return f"session '{name}' {self.run.moving} already"
                assert self.graph is not None
                anew = divided_anew(self.graph, self.record, offered, self.homes, self.doubts.shunned)
                return None if anew else f"session '{name}' would stay as it is, on {', '.join(self.run.hosts)}"

    def handle(self, event: SessionEvent, now: float) -> list[Command]:
        """Take one event; one that is illegal in the present state changes nothing."""
        match event:
            case StartSession():
                return self._start(event) if self.objection(event) is None else []
            case SuspendSession():
                return self._suspend(now) if self.record.state in UNDER_WAY else []
            case RebalanceSession():
                return self._move_on("is divided anew", now, anew=True)
            case Offered(pnodes):
                return self._offered(pnodes, now)
            case Lost(pnode, reason):
                self.doubts.lost(pnode)
                return self._back(reason) if pnode in self.hosts else []
            case Draining(pnode):
                return self._drain(pnode, now) if pnode in self.hosts else []
            case Standing():
                return self._standing(event, now)
            case Tick():
                return self._tick(now)
            case ManifestWritten():
                return self._written(event, now)
            case _:
                return self._during_run(event, now)

    def deadline(self) -> float | None:
        """When something is to be repeated, stands still, or is not there."""
        sought = self.adoption or self.run
        return sought.deadline() if sought else None

    def forgive(self, now: float) -> None:
        """The orchestrator could not hear until now: silence counts from here."""
        if self.adoption:
            self.adoption.forgive(now)
        if self.run:
            self.run.watchdog.forgive(now)

    def validate(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        state, name = self.record.state, self.record.session
        deployed, sought = state in ACTIVE - {_S.ADOPTING}, state is _S.ADOPTING
        if (self.run is not None) != deployed or (self.adoption is not None) != sought:
            raise InvariantError(f"session {name} is {state} and has {'a' if self.run else 'no'} deployment")
        if self.run:
            self.run.validate()
        if self.adoption:
            self.adoption.validate()
        if self.record != self.record.with_checkpoints(self.record.checkpoints):
            raise InvariantError(f"session {name} says step {self.record.step}, and its checkpoints {self.record.newest}")

    # -- into and out of a deployment --------------------------------------------------------------------------------------

    def _start(self, event: StartSession) -> list[Command]:
        self.graph, self.assignment, self._since = event.graph, None, Epoch(self.record.epoch + 1)
        self.doubts.begin()
        start = (event.checkpoint,) if event.checkpoint else ()
        older = tuple(known for known in self.record.checkpoints if start and known.step < start[0].step)
        record = self.record.with_checkpoints(older + start)
        known = record.validation.resumed(record.step, record.state is _S.DONE) if record.validation else None
        self.record = replace(record, steps=event.steps or record.steps, recovers=False, validation=known)
        return self._move(_S.WAITING, "waits for PNodes")

    def _offered(self, offered: Sequence[PNodeInfo], now: float) -> list[Command]:
        if self.record.state is _S.RUNNING:
            return self._spread(offered, now)
        if self.record.state is not _S.WAITING:
            return []
        assert self.graph is not None
        previous = {} if self._anew else homes_in(self.assignment, self.graph)
        try:
            homes = homes_for(self.graph, self.record, offered, previous, self.doubts.shunned)
        except DoesNotFit as error:
            return [] if self.record.reason == str(error) else self._move(_S.WAITING, str(error))
        return self._deploy(homes, offered, now)

    def _deploy(self, homes: Assignment, offered: Sequence[PNodeInfo], now: float) -> list[Command]:
        before, self._anew = self.assignment, False
        self.newest_epoch = epoch = Epoch(max(self.newest_epoch + 1, self.settings.first_epoch))
        self.record = replace(self.record, epoch=epoch)
        self.assignment = AssignmentRecord(self.record.session, epoch, named(homes), self.record.step)
        self.run = run = self._run(self.record, homes, offered, now)
        from_ = f" from step {self.record.step}" if self.record.step else ""
        moved = self._move(_S.DEPLOYING, f"deploys to {', '.join(run.hosts)}{from_}")
        return [Store(self.assignment), *moved, *self._undeploys(before, run.hosts), *run.deploys()]

    def _undeploys(self, assignment: AssignmentRecord | None, but: Sequence[PNodeId] = ()) -> list[Command]:
        """Whoever took part lets go, but those that go on, and those that are stuck."""
        hosts = sorted(set(assignment.nodes.values()).difference(but, self.doubts.avoided)) if assignment else []
        return [Publish(subjects.command(pnode), Undeploy(self.record.session, assignment.epoch)) for pnode in hosts if assignment]

    def _run(self, record: SessionRecord, homes: Mapping[NodeId, PNodeId], peers: Sequence[PNodeInfo], now: float) -> Deployment:
        assert self.graph is not None
        deploy = deploy_of(record, self.graph, homes, peers, (self.settings.storage, self.settings.probe))
        plan = plan_of(record, self.graph, homes, self.settings.me, peers)
        return Deployment(record, deploy, plan, scaler_at(record, self.graph), now)

    def _look_for(self, now: float) -> None:
        """It was under way when its orchestrator went."""
        record, why = self.record, "the orchestrator changed"
        recovers = record.recovers or record.state is not _S.DEPLOYING
        self._suspends = record.state is _S.SUSPENDING
        self.record = replace(record, state=_S.ADOPTING, reason=f"{why}; looks for its PNodes", recovers=recovers)
        if self.assignment:
            self.adoption = Adoption(self.assignment, now)
        else:
            self._back(f"{why}, and where it was is not known")

    def _adopt(self, found: Found | str, now: float) -> list[Command]:
        assert self.assignment is not None
        if isinstance(found, str):
            return self._back(found)
        start = self.assignment.step
        record = self.record.with_checkpoints(tuple(known for known in self.record.checkpoints if known.step <= start))
        if found.last is None and record.step != start:
            return self._back(f"its PNodes start from step {start}, whose checkpoint is not known any more")
        suspends, self._suspends, self.adoption = self._suspends, False, None
        record = record.standing_at(found.last.step) if found.last else record
        self.run = run = self._run(replace(record, step=start), homes_in(self.assignment, self.graph), found.peers, now)
        commands = run.adopt(found, now)
        moved = self._move(_S.RUNNING, "") if run.trains else self._move(_S.DEPLOYING, f"is still on {', '.join(run.hosts)}")
        return [*moved, *commands, *self._settle(now), *(self._suspend(now) if suspends else [])]

    def _back(self, why: str, how: str = "goes back to") -> list[Command]:
        """Out of a deployment that cannot go on, to be placed again from the newest checkpoint, if anything is left to do."""
        state, step = self.record.state, self.record.step
        if complete(self.record):
            return self._leave(_S.DONE, "")
        if state is _S.SUSPENDING or self._suspends:
            return self._leave(_S.SUSPENDED, f"{why}; the last checkpoint is of step {step}")
        self._end_run(recovers=self.record.recovers or state is _S.RUNNING)
        return self._move(_S.WAITING, why if state is _S.DEPLOYING else f"{why}; {how} step {step}")

    def _leave(self, state: SessionState, reason: str) -> list[Command]:
        """To rest: every PNode lets go."""
        undeploys, self.assignment = self._undeploys(self.assignment), None
        self._end_run(recovers=False)
        return [*undeploys, *self._move(state, reason)]

    def _end_run(self, recovers: bool) -> None:
        at_checkpoint = self.run is not None and self.run.trainer.done == self.record.step
        known = self.record.validation.back_to(self.record.step) if self.record.validation else None
        self.record = replace(self.record, recovers=recovers, loss=self.loss if at_checkpoint else self.record.loss, validation=known)
        self.run, self.adoption, self._suspends = None, None, False

    def _suspend(self, now: float) -> list[Command]:
        reason = "suspended by request"
        match self.record.state:
            case _S.WAITING | _S.DEPLOYING:
                return self._leave(_S.SUSPENDED, reason)
            case _S.RUNNING:
                assert self.run is not None
                self.run.moving = ""
                return [*self._move(_S.SUSPENDING, reason), *self.run.stop(now), *self._settle(now)]
            case _S.ADOPTING:
                self._suspends = True
                return [Store(replace(self.record, state=_S.SUSPENDING, reason=reason))]
            case _:
                return []

    def _drain(self, pnode: PNodeId, now: float) -> list[Command]:
        if self.record.state is _S.DEPLOYING:
            return self._back(f"PNode {pnode} is being drained")
        return self._move_on(f"moves away from PNode {pnode}", now)

    def _move_on(self, why: str, now: float, anew: bool = False) -> list[Command]:
        """Stop at a checkpoint, to be placed again from there."""
        run = self.run
        if run is None or self.record.state is not _S.RUNNING or run.moving:
            return []
        run.moving, self._anew = why, anew
        self.record = replace(self.record, reason=why)
        return [Store(self.record), self._told(), *run.stop(now), *self._settle(now)]

    def _spread(self, offered: Sequence[PNodeInfo], now: float) -> list[Command]:
        """A checkpoint has just become complete: use more PNodes from there, if it wants more and more can take part."""
        assert self.graph is not None
        run = self.run
        if run is None or run.moving or run.checkpoints.wanted is not None:
            return []
        homes = wider(self.graph, self.record, offered, self.homes, self.doubts.shunned)
        if homes is None:
            return []
        more = ", ".join(sorted(set(homes.pnodes) - self.hosts))
        return [*self._back(f"spreads to PNode {more}"), *self._deploy(homes, offered, now)]

    def _move(self, state: SessionState, reason: str) -> list[Command]:
        if state not in TRANSITIONS[self.record.state]:
            raise InvariantError(f"session {self.record.session} cannot go from {self.record.state} to {state}")
        self.record = replace(self.record, state=state, reason=reason)
        return [Store(self.record), self._told()]

    def _told(self) -> Command:
        return Measured(SessionMetrics(self.record.session, self.record.state, self.step, self.reason))

    # -- while deployed ----------------------------------------------------------------------------------------------------

    def _during_run(self, event: Report | Result, now: float) -> list[Command]:
        if self.record.state not in ACTIVE or event.epoch != self.record.epoch:
            self.fenced += 1
            return []
        match event:
            case Failed():
                return self._failed(event)
            case BatchFailed(message=message):
                return self._leave(_S.FAILED, message)
            case Refused():
                return self._refused(event) if self.record.state is _S.DEPLOYING else []
            case ManifestWritten():
                return []  # is handled wherever it comes from
            case _:
                return self._to_run(event, now)

    def _to_run(self, event: RunEvent, now: float) -> list[Command]:
        run = self.run
        if run is None:
            return []
        steps, trouble = run.steps, run.checkpoints.trouble
        commands = run.handle(event, now)
        if run.steps != steps:
            self.doubts.step_done()
        told = [self._told()] if run.checkpoints.trouble != trouble else []
        if run.validation.known != self.record.validation:
            self.record = self.record.with_validation(run.validation.known)
            told.append(Store(self.record))
        return [*commands, *told, *self._settle(now)]

    def _settle(self, now: float) -> list[Command]:
        """What becomes of the session by what its deployment has come to."""
        run = self.run
        assert run is not None
        outcome, run.outcome = run.outcome, None
        match outcome:
            case Begun():
                self.record = replace(self.record, recovers=False)
                return self._move(_S.RUNNING, "")
            case Hopeless(reason):
                return self._leave(_S.FAILED, reason)
            case GiveUp(reason, without, work):
                if without is not None:
                    self.doubts.stuck(without, work)
                return self._back(reason)
            case Settled():
                return self._settled(run)
            case None:
                return []

    def _settled(self, run: Deployment) -> list[Command]:
        if run.ends_early or run.trainer.done >= self.record.steps:
            return self._leave(_S.DONE, run.ends_early)
        if self.record.state is _S.SUSPENDING:
            return self._leave(_S.SUSPENDED, self.record.reason)
        return self._back(run.moving, "goes on from")

    def _tick(self, now: float) -> list[Command]:
        if self.adoption is None:
            return self._to_run(Tick(), now)
        missing = self.adoption.missing(now)
        return self._back(missing) if missing else []

    def _standing(self, event: Standing, now: float) -> list[Command]:
        pnode, hosted = event.info.pnode, event.hosted
        self.doubts.stands(pnode, hosted)
        if self.adoption is None:
            return self._to_run(event, now)
        found = self.adoption.heard(event.info, hosted) if hosted and pnode in self.adoption.hosts else None
        return self._adopt(found, now) if found else []

    def _refused(self, refused: Refused) -> list[Command]:
        assert self.run is not None
        by, deploy = f"PNode {refused.pnode}", self.run.deploy
        if not refused.damaged or deploy.checkpoint is None:
            self.doubts.refused(refused.pnode)
            return self._back(f"{by} refused: {refused.reason}")
        others = tuple(known for known in self.record.checkpoints if known.key != deploy.checkpoint)
        if not others and deploy.step:
            return self._leave(_S.FAILED, f"its last checkpoint, of step {deploy.step}, cannot be read, says {by}: {refused.reason}")
        self.record = self.record.with_checkpoints(others)
        return self._back(f"checkpoint {deploy.step} is damaged, says {by}: {refused.reason}; goes back to step {self.record.step}")

    def _failed(self, failed: Failed) -> list[Command]:
        reason = f"PNode {failed.pnode}: {failed.message}"
        if not failed.world or self.doubts.failed(failed.pnode):
            return self._leave(_S.FAILED, reason)
        return self._back(reason)

    def _written(self, event: ManifestWritten, now: float) -> list[Command]:
        """A checkpoint is complete, be it of a deployment that ended meanwhile; after the last one nothing is left to do."""
        if not self._since <= event.epoch <= self.record.epoch:
            self.fenced += 1
            return []
        record, new = self.record, event.checkpoint
        run = self.run if event.epoch == record.epoch else None
        in_use = self.run.deploy.step if self.run and record.state is _S.DEPLOYING else None
        known = [checkpoint for checkpoint in record.checkpoints if checkpoint.step != new.step]
        record = record.with_checkpoints((*known, new))
        stay, gone = retained(record.checkpoints, Hyper.model_validate(record.hyper), (in_use, record.kept, *self.read))
        left = run.checkpoints.left_over(new.step) if run else ()
        self.record = replace(record.with_checkpoints(stay), loss=self.loss)
        useless = tuple(sorted({*left, *gone}.difference(kept.step for kept in stay)))
        commands: list[Command] = [Store(self.record), *([Prune(record.session, useless)] if useless else [])]
        if run is None:
            return commands + (self._leave(_S.DONE, "") if complete(self.record) and _S.DONE in TRANSITIONS[record.state] else [])
        told = Publish(subjects.step(record.network), Complete(record.session, record.epoch, new.step))
        return [*commands, told, *self._to_run(event, now)]
