"""One session's life: placed, deployed, trained, checkpointed, suspended, resumed. `trainer` has the steps.

    created --start--> waiting --PNodes fit--> deploying --all deployed, step 0 saved--> running --last step saved--> done
                          ^                        |                                        |
                          |-refused, drained, lost-/                                  suspend, drain
                          |<--resume-- suspended <---- lost PNode --------------------------|
                          |                  ^------- saved, by request --------------- suspending
                          \\<------------- saved, drained ------------------------------------/       failed: from any of these

Rule 1: `Deploy` and `Save` are repeated every 2 s until they are answered; everything else is sent once or sent again on request.
Rule 2: reports and results of another epoch are dropped and counted.
Rule 3: a checkpoint exists when its manifest is written, and that happens when every PNode's part is in storage.
Rule 4: whoever leaves the active states lets go of every PNode, and stands at a checkpoint (step 0: the seed).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from dcnr.bus import subjects
from dcnr.bus.messages import (
    Deploy,
    Deployed,
    Failed,
    Loss,
    PNodeInfo,
    Refused,
    Report,
    Save,
    Saved,
    SavedPart,
    SessionMetrics,
    StepDone,
    StepReport,
    Undeploy,
)
from dcnr.errors import DoesNotFit, InvariantError
from dcnr.ids import Epoch, NodeId, PNodeId
from dcnr.network.graph import Graph
from dcnr.optim.decide import ScalerState, initial_state
from dcnr.optim.hyper import Hyper
from dcnr.orchestrator.commands import Command, Measured, Publish, Store, WriteManifest
from dcnr.orchestrator.events import (
    BatchFailed,
    BatchRead,
    Draining,
    Lost,
    ManifestFailed,
    ManifestWritten,
    Offered,
    Result,
    SessionEvent,
    StartSession,
    SuspendSession,
    Tick,
)
from dcnr.orchestrator.feed import Address, costs_of, feeds_of
from dcnr.orchestrator.state import ACTIVE, AssignmentRecord, CheckpointRecord, SessionRecord, SessionState
from dcnr.orchestrator.trainer import Plan, Trainer, scaler_fields, scaler_of
from dcnr.placement.place import Host, place
from dcnr.placement.segments import cut_segments

REPEAT_AFTER = 2.0
"""Seconds between repetitions of a command that has not been answered."""
KEPT_CHECKPOINTS = 32
"""How many checkpoints a record lists: the first and the newest. Storage has them all."""

_S = SessionState
TRANSITIONS: dict[SessionState, frozenset[SessionState]] = {
    _S.CREATED: frozenset({_S.WAITING}),
    _S.WAITING: frozenset({_S.WAITING, _S.DEPLOYING, _S.SUSPENDED, _S.FAILED}),
    _S.DEPLOYING: frozenset({_S.WAITING, _S.RUNNING, _S.SUSPENDED, _S.FAILED}),
    _S.RUNNING: frozenset({_S.SUSPENDING, _S.SUSPENDED, _S.DONE, _S.FAILED}),
    _S.SUSPENDING: frozenset({_S.WAITING, _S.SUSPENDED, _S.DONE, _S.FAILED}),
    _S.SUSPENDED: frozenset({_S.WAITING}),
    _S.DONE: frozenset({_S.WAITING}),
    _S.FAILED: frozenset({_S.WAITING}),
}
_STARTABLE = frozenset({_S.CREATED, _S.SUSPENDED, _S.DONE, _S.FAILED})
_SUSPENDABLE = frozenset({_S.WAITING, _S.DEPLOYING, _S.RUNNING, _S.SUSPENDING})


@dataclass(frozen=True, slots=True)
class Settings:
    """What all sessions of an orchestrator share: its name as a sender of hops, and the storage that PNodes load from and save to."""

    me: PNodeId
    storage: str


@dataclass(slots=True)
class Pending:
    """A checkpoint under way. `scaler` is None until the PNode that decides has sent it."""

    scaler: dict[str, int | float] | None
    parts: dict[PNodeId, SavedPart] = field(default_factory=dict)


@dataclass(slots=True)
class Run:
    """One deployment. `saving` is the step whose checkpoint everything waits for."""

    deploys: dict[PNodeId, Deploy]
    trainer: Trainer
    repeat_at: float
    deployed: set[PNodeId] = field(default_factory=set)
    saving: int | None = None
    pending: dict[int, Pending] = field(default_factory=dict)
    unwritten: set[int] = field(default_factory=set)
    trouble: str = ""
    """What holds up a checkpoint, in words."""


class Session:
    """The machine of one session. `graph` is the prepared one, and known while the session is not at rest."""

    def __init__(self, record: SessionRecord, settings: Settings) -> None:
        self.record = record
        self.settings = settings
        self.graph: Graph | None = None
        self.run: Run | None = None
        self.fenced = 0
        self._again = False

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
        return self.run.trouble if self.run and self.run.trouble else self.record.reason

    @property
    def homes(self) -> dict[NodeId, PNodeId]:
        """Where its VNodes live; empty while no PNode holds it."""
        return self.run.trainer.plan.address.homes if self.run else {}

    def uses(self, pnode: PNodeId, epoch: Epoch) -> bool:
        """Whether `pnode` rightly hosts a part of this session in `epoch`."""
        return self.run is not None and epoch == self.record.epoch and pnode in self.run.deploys

    def created(self) -> list[Command]:
        """Write down that the session exists."""
        return [Store(self.record), self._told()]

    def objection(self, event: StartSession | SuspendSession) -> str | None:
        """Why the session cannot do what is asked now, if it cannot."""
        state, name = self.record.state, self.record.session
        match event:
            case StartSession(steps=steps):
                total = steps or self.record.steps
                if state not in _STARTABLE:
                    return f"session '{name}' is {state} already"
                done = event.checkpoint.step if event.checkpoint else 0
                return f"session '{name}' has done step {done} of {total}; ask for more steps" if done >= total else None
            case SuspendSession():
                return None if state in _SUSPENDABLE else f"session '{name}' is {state}, so there is nothing to suspend"

    def handle(self, event: SessionEvent, now: float) -> list[Command]:
        """Take one event; one that is illegal in the present state changes nothing."""
        match event:
            case StartSession():
                return self._start(event) if self.objection(event) is None else []
            case SuspendSession():
                self._again = False
                return self._suspend("suspended by request", now) if self.record.state in _SUSPENDABLE else []
            case Offered(pnodes):
                return self._place(pnodes, now) if self.record.state is _S.WAITING else []
            case Lost(pnode, reason):
                return self._lost(reason) if self.uses(pnode, self.record.epoch) else []
            case Draining(pnode):
                return self._drain(pnode, now) if self.uses(pnode, self.record.epoch) else []
            case Tick():
                return self._repeat(now)
            case ManifestWritten(epoch=epoch, checkpoint=checkpoint) if self.run is None and epoch == self.record.epoch:
                return self._written_late(checkpoint)
            case _:
                return self._during_run(event, now)

    def deadline(self) -> float | None:
        """When an unanswered command is to be repeated."""
        run = self.run
        return run.repeat_at if run and (self.record.state is _S.DEPLOYING or run.saving is not None or run.unwritten) else None

    def validate(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        if (self.run is not None) != (self.record.state in ACTIVE):
            raise InvariantError(f"session {self.record.session} is {self.record.state} and has {'a' if self.run else 'no'} deployment")
        if self.run and self.run.trainer.done > self.record.steps:
            raise InvariantError(f"session {self.record.session} did step {self.run.trainer.done} of {self.record.steps}")

    # -- into and out of a deployment --------------------------------------------------------------------------------------

    def _start(self, event: StartSession) -> list[Command]:
        self.graph = event.graph
        step = event.checkpoint.step if event.checkpoint else 0
        known = tuple(c for c in self.record.checkpoints if c.step < step) + ((event.checkpoint,) if event.checkpoint else ())
        self.record = replace(self.record, steps=event.steps or self.record.steps, step=step, checkpoints=known)
        return self._move(_S.WAITING, "waits for PNodes")

    def _place(self, offered: Sequence[PNodeInfo], now: float) -> list[Command]:
        assert self.graph is not None
        wanted = self.record.pnodes or max(1, len(offered))
        if len(offered) < wanted:
            return self._wait(f"it needs {wanted} PNode{'s' * (wanted > 1)} and {len(offered)} can take work; start one with `dcnr-agent`")
        hosts = [Host(info.pnode, max(0, info.memory_total - info.memory_used), info.cores) for info in offered[:wanted]]
        try:
            assignment = place(self.graph, hosts, self.record.batch // self.record.micro_batches)
        except DoesNotFit as error:
            return self._wait(str(error))
        homes = dict(assignment)
        self.record = replace(self.record, epoch=Epoch(self.record.epoch + 1))
        self.run = self._deployment(homes, offered, now)
        stored = Store(AssignmentRecord(self.record.session, self.record.epoch, _named(homes)))
        moved = self._move(_S.DEPLOYING, f"deploys to {', '.join(self.run.deploys)}")
        return [stored, *moved, *self._deploys()]

    def _wait(self, reason: str) -> list[Command]:
        return [] if self.record.reason == reason else self._move(_S.WAITING, reason)

    def _deployment(self, homes: dict[NodeId, PNodeId], offered: Sequence[PNodeInfo], now: float) -> Run:
        plan, scaler = self._plan(homes), self._scaler()
        peers = tuple(info for info in offered if info.pnode in plan.hosts)
        record, newest = self.record, self.record.newest
        deploy = Deploy(
            network=record.network,
            session=record.session,
            epoch=record.epoch,
            network_file=record.network_file,
            fuse=record.fuse,
            assignment=_named(homes),
            peers=peers,
            hyper=record.hyper,
            state=scaler_fields(scaler),
            seed=record.seed,
            total_steps=record.steps,
            micro_batches=record.micro_batches,
            batch=record.batch,
            step=record.step,
            storage=self.settings.storage,
            checkpoint=newest.key if newest else None,
            decides=plan.decides,
        )
        trainer = Trainer(plan, record.step, scaler, now)
        return Run(dict.fromkeys(plan.hosts, deploy), trainer, now + REPEAT_AFTER)

    def _plan(self, homes: dict[NodeId, PNodeId]) -> Plan:
        graph, record = self.graph, self.record
        assert graph is not None
        hosts = set(homes.values())
        return Plan(
            address=Address(record.network, record.session, record.epoch, self.settings.me, homes),
            feeds=feeds_of(graph),
            order=tuple(node.id for node in graph.nodes),
            costs=costs_of(graph),
            hyper=Hyper.model_validate(record.hyper),
            dataset=record.dataset,
            seed=record.seed,
            steps=record.steps,
            batch=record.batch,
            micro_batches=record.micro_batches,
            window=len(cut_segments(graph, homes)) + 1,
            decides=len(hosts) == 1,
        )

    def _scaler(self) -> ScalerState:
        assert self.graph is not None
        newest = self.record.newest
        if newest is not None:
            return scaler_of(newest.scaler)
        float16 = any("float16" in (node.param_precision, node.activation_precision) for node in self.graph.nodes)
        return initial_state(Hyper.model_validate(self.record.hyper), float16)

    def _deploys(self) -> list[Command]:
        assert self.run is not None
        missing = [item for item in self.run.deploys.items() if item[0] not in self.run.deployed]
        return [Publish(subjects.command(pnode), deploy) for pnode, deploy in missing]

    def _leave(self, state: SessionState, reason: str, fault: bool = False) -> list[Command]:
        """Out of the active states: every PNode lets go, and the record stands at the newest checkpoint."""
        assert self.run is not None
        undeploy = Undeploy(self.record.session, self.record.epoch)
        commands: list[Command] = [Publish(subjects.command(pnode), undeploy) for pnode in self.run.deploys]
        step = self.record.newest.step if self.record.newest else 0
        self.record = replace(self.record, step=step, loss=self.loss if step == self.step else self.record.loss)
        self.run = None
        return [*commands, *self._move(state, reason, fault)]

    def _lost(self, reason: str) -> list[Command]:
        self._again = False
        if self.record.state is _S.DEPLOYING:
            return self._leave(_S.WAITING, reason)
        step = self.record.newest.step if self.record.newest else 0
        return self._leave(_S.SUSPENDED, f"{reason}; the last checkpoint is of step {step}", fault=True)

    def _fail(self, reason: str) -> list[Command]:
        self._again = False
        return self._leave(_S.FAILED, reason)

    def _drain(self, pnode: PNodeId, now: float) -> list[Command]:
        match self.record.state:
            case _S.DEPLOYING:
                return self._leave(_S.WAITING, f"PNode {pnode} is being drained")
            case _S.RUNNING:
                self._again = True
                return self._suspend(f"moves away from PNode {pnode}", now)
            case _:
                return []

    def _suspend(self, reason: str, now: float) -> list[Command]:
        match self.record.state:
            case _S.WAITING:
                return self._move(_S.SUSPENDED, reason)
            case _S.DEPLOYING:
                return self._leave(_S.SUSPENDED, reason)
            case _S.RUNNING:
                assert self.run is not None
                self.run.trainer.stop()
                return [*self._move(_S.SUSPENDING, reason), *self._save_if_idle(now)]
            case _:
                self.record = replace(self.record, reason=reason)
                return [Store(self.record), self._told()]

    def _move(self, state: SessionState, reason: str, fault: bool = False) -> list[Command]:
        if state not in TRANSITIONS[self.record.state]:
            raise InvariantError(f"session {self.record.session} cannot go from {self.record.state} to {state}")
        self.record = replace(self.record, state=state, reason=reason, fault=fault)
        return [Store(self.record), self._told()]

    def _told(self) -> Command:
        return Measured(SessionMetrics(self.record.session, self.record.state, self.step, self.reason, self.record.fault))

    # -- while deployed ----------------------------------------------------------------------------------------------------

    def _during_run(self, event: Report | Result, now: float) -> list[Command]:
        run = self.run
        if run is None or event.epoch != self.record.epoch:
            self.fenced += 1
            return []
        match event:
            case Deployed(pnode):
                return self._deployed(run, pnode, now)
            case Refused(pnode, reason=reason):
                return self._leave(_S.WAITING, f"PNode {pnode} refused: {reason}") if self.record.state is _S.DEPLOYING else []
            case Loss():
                return run.trainer.lost(event)
            case StepReport() | StepDone():
                return self._stepped(run, event, now)
            case Saved():
                return self._saved(run, event)
            case Failed(pnode, message=message):
                return self._fail(f"PNode {pnode}: {message}")
            case BatchRead(step=step, tokens_BS=tokens_BS):
                return run.trainer.batch_read(step, tokens_BS)
            case BatchFailed(message=message):
                return self._fail(message)
            case ManifestWritten(checkpoint=checkpoint):
                return self._written(run, checkpoint, now)
            case ManifestFailed(step=step, message=message):
                return self._unwritten(run, step, message, now)
            case _:
                assert_never(event)

    def _deployed(self, run: Run, pnode: PNodeId, now: float) -> list[Command]:
        if self.record.state is not _S.DEPLOYING or pnode not in run.deploys or pnode in run.deployed:
            return []
        run.deployed.add(pnode)
        if run.deployed != run.deploys.keys():
            return []
        return self._begin(run, now) if self.record.newest else self._save(run, now)

    def _begin(self, run: Run, now: float) -> list[Command]:
        run.trainer.begin(now)
        return [*self._move(_S.RUNNING, ""), *run.trainer.pump()]

    def _stepped(self, run: Run, report: StepReport | StepDone, now: float) -> list[Command]:
        done = run.trainer.done
        commands = run.trainer.reported(report, now) if isinstance(report, StepReport) else run.trainer.decided(report, now)
        every = run.trainer.plan.hyper.checkpoint_every
        if run.trainer.done == done:
            return commands
        if every and run.trainer.done % every == 0 and not run.trainer.plan.decides:
            run.pending[run.trainer.done] = Pending(scaler_fields(run.trainer.scaler))
        if run.trainer.hopeless:
            return [*commands, *self._fail(run.trainer.hopeless)]
        return [*commands, *self._save_if_idle(now)]

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def _save_if_idle(self, now: float) -> list[Command]:
        assert self.run is not None
        return self._save(self.run, now) if self.run.trainer.idle and self.run.saving is None else []

    def _save(self, run: Run, now: float) -> list[Command]:
        step = run.trainer.done
        if any(checkpoint.step == step for checkpoint in self.record.checkpoints):
            return self._settled()
        run.saving, run.repeat_at = step, now + REPEAT_AFTER
        run.pending.setdefault(step, Pending(None if run.trainer.plan.decides else scaler_fields(run.trainer.scaler)))
        return self._saves(run)

    def _saves(self, run: Run) -> list[Command]:
        if run.saving is None:
            return []
        save = Save(self.record.session, self.record.epoch, run.saving)
        missing = [pnode for pnode in run.deploys if pnode not in run.pending[save.step].parts]
        return [Publish(subjects.command(pnode), save) for pnode in missing]

    def _saved(self, run: Run, saved: Saved) -> list[Command]:
        if saved.pnode not in run.deploys or any(checkpoint.step == saved.step for checkpoint in self.record.checkpoints):
            return []
        if run.trainer.plan.decides:
            run.pending.setdefault(saved.step, Pending(None))
        pending = run.pending.get(saved.step)
        if pending is None or saved.pnode in pending.parts:
            return []
        pending.scaler = pending.scaler or saved.state
        pending.parts[saved.pnode] = saved.part
        return self._manifest(run, saved.step, pending) if pending.parts.keys() == run.deploys.keys() else []

    def _manifest(self, run: Run, step: int, pending: Pending) -> list[Command]:
        if pending.scaler is None:
            return self._fail(f"PNode {next(iter(pending.parts))} saved step {step} without the state of its loss scaler")
        parts = tuple(pending.parts[pnode] for pnode in sorted(pending.parts))
        kernels = {f"{peer.backend} on {peer.device}" for deploy in run.deploys.values() for peer in deploy.peers}
        return [WriteManifest(self.record, step, "; ".join(sorted(kernels)), parts, pending.scaler)]

    def _written(self, run: Run, checkpoint: CheckpointRecord, now: float) -> list[Command]:
        run.pending.pop(checkpoint.step, None)
        run.trouble = ""
        self.record = replace(_with(self.record, checkpoint), loss=self.loss)
        if run.saving != checkpoint.step:
            return [Store(self.record)]
        run.saving = None
        return self._begin(run, now) if self.record.state is _S.DEPLOYING else self._settled()

    def _written_late(self, checkpoint: CheckpointRecord) -> list[Command]:
        """It became complete just after the deployment had ended: a resume will start from it."""
        self.record = _with(self.record, checkpoint)
        return [Store(self.record)]

    def _unwritten(self, run: Run, step: int, message: str, now: float) -> list[Command]:
        run.unwritten.add(step)
        run.repeat_at = now + REPEAT_AFTER
        run.trouble = f"the manifest of checkpoint {step} could not be written, trying again: {message}"
        return [self._told()]

    def _settled(self) -> list[Command]:
        """The last step that was to be done is done and saved."""
        assert self.run is not None
        if self.run.trainer.done >= self.record.steps:
            return self._leave(_S.DONE, "")
        if not self._again:
            return self._leave(_S.SUSPENDED, self.record.reason)
        self._again = False
        return self._leave(_S.WAITING, self.record.reason)

    def _repeat(self, now: float) -> list[Command]:
        run = self.run
        if run is None or now < run.repeat_at:
            return []
        run.repeat_at = now + REPEAT_AFTER
        commands = self._deploys() if self.record.state is _S.DEPLOYING and run.deployed != run.deploys.keys() else self._saves(run)
        unwritten, run.unwritten = sorted(run.unwritten), set()
        return commands + [command for step in unwritten for command in self._manifest(run, step, run.pending[step])]


def _named(homes: Mapping[NodeId, PNodeId]) -> dict[str, PNodeId]:
    """An assignment as it travels."""
    return {str(node): pnode for node, pnode in homes.items()}


def _with(record: SessionRecord, checkpoint: CheckpointRecord) -> SessionRecord:
    """The record with one more checkpoint, standing at the newest."""
    others = [known for known in record.checkpoints if known.step != checkpoint.step]
    first, *later = sorted((*others, checkpoint), key=lambda known: known.step)
    return replace(record, checkpoints=(first, *later[-KEPT_CHECKPOINTS + 1 :]), step=later[-1].step if later else first.step)
