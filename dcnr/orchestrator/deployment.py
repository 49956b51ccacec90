"""One deployment of a session: everyone deploys, step 0 is saved, and then it trains, until its last step is saved or it cannot go on.

Rule 1: `Deploy` is repeated every 2 s to those that have not answered it; nothing is fed before everyone has.
Rule 2: from the seed, the state before step 1 is saved first. When everything that may be fed is decided, the state is saved, unless it is.
Rule 3: a part of a checkpoint counts when its step is known to be done; one that comes earlier is asked for again.
Rule 4: after the steps that are to be validated everything stands until that is done. If it was the best so far, its checkpoint is asked
for, and waited for unless storage refuses it; if it has been the best for too long, training ends there. Who is to stop there does not wait
for a validation: it is done when the session goes on, except that of the last step, with which it ends.
Rule 5: it acts on what it hears of its own epoch, and says in `outcome` what the session has to decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from dcnr.bus import subjects
from dcnr.bus.messages import Deploy, Deployed, EvalLoss, Hosted, Loss, Saved, SaveFailed, StepDone, StepReport
from dcnr.errors import InvariantError
from dcnr.ids import PNodeId
from dcnr.optim.decide import ScalerState
from dcnr.orchestrator.checkpoints import REPEAT_AFTER, Checkpoints
from dcnr.orchestrator.commands import Command, Publish
from dcnr.orchestrator.events import BatchRead, ManifestFailed, ManifestWritten, Standing, Tick, WindowsRead
from dcnr.orchestrator.failover import Found
from dcnr.orchestrator.state import SessionRecord
from dcnr.orchestrator.trainer import Plan, Trainer, scaler_fields
from dcnr.orchestrator.validation import Validation
from dcnr.orchestrator.watchdog import Again, GiveUp, Sight, Watchdog


@dataclass(frozen=True, slots=True)
class Begun:
    """It trains."""


@dataclass(frozen=True, slots=True)
class Settled:
    """Everything that was to be done is done and saved."""


@dataclass(frozen=True, slots=True)
class Hopeless:
    """Going on makes no sense."""

    reason: str


Outcome = Begun | Settled | Hopeless | GiveUp
Said = Deployed | Loss | EvalLoss | StepReport | StepDone | Saved | SaveFailed
RunEvent = Said | BatchRead | WindowsRead | ManifestWritten | ManifestFailed | Standing | Tick


class Deployment:
    """The machine of one deployment. `moving`: why it is divided anew at the checkpoint that it is coming to; empty if it is not."""

    def __init__(self, record: SessionRecord, deploy: Deploy, plan: Plan, scaler: ScalerState, now: float) -> None:
        kernel = "; ".join(sorted({f"{info.backend} on {info.device}" for info in deploy.peers}))
        self.deploy = deploy
        self.trainer = Trainer(plan, deploy.step, scaler, now)
        self.checkpoints = Checkpoints(record, deploy, kernel)
        self.watchdog = Watchdog(plan.hosts, deploy.step, now)
        known = record.validation
        self.validation = Validation(plan, known, max(deploy.step - 1, known.upto if known else 0))
        self.trainer.hold = self.validation.hold
        self.trains = False
        self.moving = ""
        self.steps = 0
        """Steps done in this deployment."""
        self.ends_early = ""
        """Why it ends before its last step; empty if it does not."""
        self.outcome: Outcome | None = None
        """For the session to take."""
        self._owing = set(plan.hosts)
        """Those that have not answered their deploy."""
        self._stopping = False
        self._repeat_at = now + REPEAT_AFTER

    @property
    def hosts(self) -> tuple[PNodeId, ...]:
        """Its PNodes, by name."""
        return self.trainer.hosts

    def deploys(self) -> list[Command]:
        """The word to those that have not answered it."""
        return [Publish(subjects.command(pnode), self.deploy) for pnode in sorted(self._owing)]

    def adopt(self, found: Found, now: float) -> list[Command]:
        """It is one that an earlier leader left: nothing is known of it but where its PNodes stand."""
        self.validation.first_attempt = found.attempt
        if found.last is None:
            self.trainer.renew(found.attempt)
            return self.deploys()
        self.trains = True
        self._owing.clear()
        self.trainer.begin(now)
        self._end_early(found.last.step)
        if self._beyond_hold(found.last.step):
            return []
        return self._after(self.trainer.take_over(found.last, found.attempt, now), now)

    def stop(self, now: float) -> list[Command]:
        """Come to an end at a checkpoint, after the steps that have begun."""
        self.trainer.stop()
        self._stopping = True
        if self.trainer.done < self.trainer.plan.steps:
            self.validation.cancel()
        return self._rest(now)

    def handle(self, event: RunEvent, now: float) -> list[Command]:
        """Take one event of this epoch."""
        match event:
            case Deployed(pnode):
                return self._deployed(pnode, now)
            case Loss():
                return self.trainer.lost(event)
            case StepReport():
                return self._after(self.trainer.reported(event, now), now)
            case StepDone(step=step):
                return self._after(self.trainer.decided(event, now), now) if self.trains and not self._beyond_hold(step) else []
            case BatchRead(step=step, tokens_BS=tokens_BS):
                return self.trainer.batch_read(step, tokens_BS)
            case WindowsRead():
                return self.validation.read(event)
            case EvalLoss():
                return self._validated(event, now)
            case Saved() | SaveFailed() | ManifestWritten() | ManifestFailed():
                return self._of_checkpoint(event, now)
            case Standing(info, hosted):
                return self._standing(info.pnode, hosted, now)
            case Tick():
                return self._repeat(now) + self._watch(now)
            case _:
                assert_never(event)

    def deadline(self) -> float:
        """When something is to be repeated, or stands still."""
        times = (self._repeat_at if self._owing else None, self.checkpoints.deadline(), self.watchdog.deadline())
        return min(time for time in times if time is not None)

    def validate(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        self.checkpoints.validate()
        self.watchdog.validate()
        self.validation.validate()
        name = self.deploy.session
        if self.trainer.done > self.deploy.total_steps:
            raise InvariantError(f"session {name} did step {self.trainer.done} of {self.deploy.total_steps}")
        if self._owing and self.trains:
            raise InvariantError(f"session {name} trains, and is not deployed to {', '.join(sorted(self._owing))}")
        if self.outcome is not None:
            raise InvariantError(f"nobody took it that session {name} has come to {self.outcome}")

    def _deployed(self, pnode: PNodeId, now: float) -> list[Command]:
        if pnode not in self._owing:
            return []
        self._owing.discard(pnode)
        if self._owing:
            return []
        return self._begin(now) if self.checkpoints.has(self.trainer.done) else self._save(now)

    def _begin(self, now: float) -> list[Command]:
        self._end_early(self.trainer.done)
        self.trains, self.outcome = True, Settled() if self.ends_early else Begun()
        self.trainer.begin(now)
        return [*self.trainer.pump(), *self._validate()]

    def _of_checkpoint(self, event: Saved | SaveFailed | ManifestWritten | ManifestFailed, now: float) -> list[Command]:
        """Something of a checkpoint; when the one that training waits for is there, or given up, it goes on."""
        waited = self.checkpoints.asked is not None
        commands: list[Command] = []
        match event:
            case Saved():
                commands = self._saved(event, now)
            case SaveFailed():
                self.checkpoints.failed(event)
            case ManifestWritten(checkpoint=checkpoint):
                commands = self._written(checkpoint.step, now)
            case ManifestFailed(step=step, message=message):
                self.checkpoints.unwritten(step, message, now)
        return [*commands, *(self._go_on(now) if waited and self.checkpoints.asked is None else [])]

    def _saved(self, saved: Saved, now: float) -> list[Command]:
        """A checkpoint waits for its step: whoever went back to one that is complete would never hear of steps before it again."""
        if saved.step <= self.trainer.done:
            return self.checkpoints.saved(saved, now)
        if self.trainer.plan.decides and saved.state is not None:
            self.checkpoints.expect(saved.step, saved.state, now)  # and it is asked for again
        return []

    def _written(self, step: int, now: float) -> list[Command]:
        awaited = step == self.checkpoints.wanted
        self.checkpoints.written(step)
        if not awaited:
            return []
        if not self.trains:
            return self._begin(now)
        self.outcome = Settled()
        return []

    def _after(self, commands: list[Command], now: float) -> list[Command]:
        """What follows from the steps that were done, if any were."""
        trainer = self.trainer
        done = trainer.done - self.deploy.step
        if done == self.steps:
            return commands
        self.steps = done
        decision = trainer.decision
        if decision and decision.save and decision.step == trainer.done:
            self.checkpoints.expect(trainer.done, scaler_fields(trainer.scaler), now)
        if trainer.hopeless:
            self.outcome = Hopeless(trainer.hopeless)
        return [*commands, *self._rest(now)]

    def _rest(self, now: float) -> list[Command]:
        """What is to be done where nothing is fed: validate, or save the last state."""
        if self.outcome is not None or self.checkpoints.wanted is not None:
            return []
        self._end_early(self.trainer.done)
        commands = self._validate()
        waits = self.validation.under_way or self.checkpoints.asked is not None or not self._goes_on
        return commands if waits or not self.trainer.idle else [*commands, *self._save(now)]

    @property
    def _goes_on(self) -> bool:
        """It has not come to an end yet."""
        return self.outcome in (None, Begun())

    # -- validation ------------------------------------------------------------------------------------------------------

    def _validate(self) -> list[Command]:
        """Begin a validation, if one is due."""
        done, plan = self.trainer.done, self.trainer.plan
        self._beyond_hold(done)
        due = self._goes_on and not self.ends_early and self.validation.due(done) and (done == plan.steps or not self._stopping)
        return self.validation.begin(done) if due else []

    def _beyond_hold(self, step: int) -> bool:
        """Whether a PNode has done `step`, which no validation lets it do: an earlier leader did, and could not write that down."""
        hold = self.trainer.hold
        if step > hold:
            self.outcome = self.outcome or GiveUp(f"a PNode went on to step {step} before step {hold} was validated")
        return step > hold

    def _validated(self, loss: EvalLoss, now: float) -> list[Command]:
        """A micro-batch has come through, perhaps the last one."""
        before = self.validation.last
        commands = self.validation.heard(loss)
        last = self.validation.last
        if last is None or last is before:
            return commands
        if last.best:
            commands += self.checkpoints.ask(self.trainer.done, scaler_fields(self.trainer.scaler), now)
        return commands if self.checkpoints.asked is not None else [*commands, *self._go_on(now)]

    def _go_on(self, now: float) -> list[Command]:
        """After a validation."""
        self._end_early(self.trainer.done)
        return [*self.trainer.release(self.validation.hold, now), *self._rest(now)]

    def _end_early(self, step: int) -> None:
        """After `step`, the newest that anybody has done, if the validation of it says so."""
        known, trainer = self.validation.known, self.trainer
        if known is not None and known.upto == step < trainer.plan.steps and (why := self.validation.early_end):
            self.ends_early = why
            trainer.limit = step

    # -- standstill ------------------------------------------------------------------------------------------------------

    def _save(self, now: float) -> list[Command]:
        step = self.trainer.done
        if self.checkpoints.has(step):
            self.outcome = Settled()
            return []
        return self.checkpoints.want(step, scaler_fields(self.trainer.scaler), now)

    def _repeat(self, now: float) -> list[Command]:
        commands = self.checkpoints.repeat(now)
        if not self._owing or now < self._repeat_at:
            return commands
        self._repeat_at = now + REPEAT_AFTER
        return commands + self.deploys()

    def _standing(self, pnode: PNodeId, hosted: Hosted | None, now: float) -> list[Command]:
        if hosted is None or hosted.epoch != self.deploy.epoch or pnode not in self.hosts:
            return self._watch(now)
        self.watchdog.heard(pnode, hosted, now)
        taken = self._after(self.trainer.take(hosted.last, now), now) if hosted.last and self.trains else []
        return taken + self._watch(now)

    def _watch(self, now: float) -> list[Command]:
        trainer, validation = self.trainer, self.validation
        under_way = (trainer.under_way or validation.waits) and self.trains
        sight = Sight(trainer.done, trainer.news + validation.news, under_way, self._owing, validation.answered, validation.under_way)
        match self.watchdog.verdict(sight, now):
            case Again():
                return validation.again() if validation.under_way else trainer.again()
            case GiveUp() as verdict:
                self.outcome = self.outcome or verdict
                return []
            case None:
                return []
