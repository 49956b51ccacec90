"""The checkpoints of one deployment: which are under way, and which one everything waits for. And which of a session's stay.

Rule 1: the manifest of a checkpoint is written when every PNode's part is in storage; then it is complete.
Rule 2: `Save` is repeated every 2 s to those whose part is missing: of the checkpoint that is wanted, or else of the newest one.
Rule 3: one that is not wanted is given up when storage refuses a part, or when too many newer ones have begun: training goes on, and the
next one comes at its time. What is left of it is removed when a newer one is complete.
Rule 4: a manifest that could not be written is tried again every 2 s.
Rule 5: what was the best so far in a validation is asked for as if it were wanted. If storage refuses it, training goes on; it is asked
for all the same until a newer one begins, and then given up.
Rule 6: whatever holds up a checkpoint is told until one is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dcnr.bus import subjects
from dcnr.bus.messages import Deploy, Save, Saved, SavedPart, SaveFailed
from dcnr.errors import InvariantError
from dcnr.ids import PNodeId
from dcnr.optim.hyper import Hyper
from dcnr.orchestrator.commands import Command, Publish, WriteManifest
from dcnr.orchestrator.state import CheckpointRecord, SessionRecord

REPEAT_AFTER = 2.0
"""Seconds between repetitions of what has not been answered."""
UNDER_WAY = 8
"""How many checkpoints may be under way."""
REMEMBERED = 64
"""How many complete ones are known, so that a late word of one does not begin it anew."""
LISTED = 256
"""How many checkpoints a record lists, or `keep_last` of them. Storage may keep more."""


@dataclass(slots=True)
class Pending:
    """A checkpoint under way. `scaler` is None until the PNode that decides has sent it."""

    scaler: dict[str, int | float] | None
    parts: dict[PNodeId, SavedPart] = field(default_factory=dict)


class Checkpoints:
    """Of the deployment `deploy` of the session that `record` describes. `kernel` says what computes it."""

    def __init__(self, record: SessionRecord, deploy: Deploy, kernel: str) -> None:
        self.wanted: int | None = None
        """The step whose checkpoint everything waits for."""
        self.asked: int | None = None
        """The step of the one that training waits for, unless storage refuses it."""
        self.trouble = ""
        """What holds up a checkpoint, in words."""
        self._record = record
        self._hosts = frozenset(deploy.assignment.values())
        self._kernel = kernel
        self._alone = deploy.decides
        """Its only PNode decides, and says when it saves."""
        self._start = deploy.step if deploy.checkpoint else None
        self._pending: dict[int, Pending] = {}
        self._unwritten: set[int] = set()
        self._refused: int | None = None
        """The step of one that training waited for until storage refused it."""
        self._given_up: set[int] = set()
        self._complete: deque[int] = deque(maxlen=REMEMBERED)
        self._repeat_at = 0.0

    def has(self, step: int) -> bool:
        """Whether the checkpoint of `step` is complete, as far as this deployment knows."""
        return step == self._start or step in self._complete

    def expect(self, step: int, scaler: dict[str, int | float], now: float) -> None:
        """All PNodes save the state after `step`, because the decision said so."""
        self._begin(step, scaler, now)

    def want(self, step: int, scaler: dict[str, int | float], now: float) -> list[Command]:
        """Ask for a checkpoint of `step`, at which everything stands; it is `wanted` until it is complete."""
        self.wanted = step
        self._begin(step, None if self._alone else scaler, now)
        return self._asks(now)

    def ask(self, step: int, scaler: dict[str, int | float], now: float) -> list[Command]:
        """Ask for a checkpoint of `step`, at which everything stands; it is `asked` until it is complete, or refused."""
        if self.has(step):
            return []
        self._let_go(step)
        self.asked = step
        self._begin(step, None if self._alone else scaler, now)
        return self._asks(now)

    def saved(self, saved: Saved, now: float) -> list[Command]:
        """A part is in storage."""
        step = saved.step
        if saved.pnode not in self._hosts or step in self._complete:
            return []
        if self._alone:
            if saved.state is None:
                self.trouble = f"PNode {saved.pnode} saved step {step} without the state of its loss scaler"
                return []
            self._begin(step, saved.state, now).scaler = saved.state
        pending = self._pending.get(step)
        if pending is None or saved.pnode in pending.parts:
            return []
        pending.parts[saved.pnode] = saved.part
        return self._manifest(step) if pending.parts.keys() == self._hosts else []

    def failed(self, failed: SaveFailed) -> None:
        """Storage refused a part."""
        step = failed.step
        if failed.pnode not in self._hosts or step in self._complete:
            return
        if step == self.wanted:
            self.trouble = f"PNode {failed.pnode} could not save checkpoint {step}, trying again: {failed.message}"
        elif step in (self.asked, self._refused):
            until = "trying again until there is a newer one"
            self.trouble = f"PNode {failed.pnode} could not save checkpoint {step}, {until}: {failed.message}"
            self.asked, self._refused = None, step
        elif self._alone or step in self._pending:
            self.trouble = f"PNode {failed.pnode} could not save checkpoint {step}, which is left out: {failed.message}"
            self._give_up(step)

    def unwritten(self, step: int, message: str, now: float) -> None:
        """Storage refused a manifest."""
        if step in self._pending:
            self._unwritten.add(step)
            self.asked = None if step == self.asked else self.asked
            self._repeat_at = now + REPEAT_AFTER
            self.trouble = f"the manifest of checkpoint {step} could not be written, trying again: {message}"

    def written(self, step: int) -> None:
        """A checkpoint is complete."""
        self._pending.pop(step, None)
        self._unwritten.discard(step)
        self._given_up.discard(step)
        self._complete.append(step)
        self.trouble = ""
        if self.wanted == step:
            self.wanted = None
        self._let_go(step)

    def left_over(self, step: int) -> tuple[int, ...]:
        """Steps older than `step` of checkpoints that were given up: nobody needs what there is of them. They are named once."""
        left = tuple(sorted(old for old in self._given_up if old < step))
        self._given_up.difference_update(left)
        return left

    def repeat(self, now: float) -> list[Command]:
        """Ask again for what is missing, if it is time to."""
        due = self.deadline()
        if due is None or now < due:
            return []
        asks = self._asks(now)
        awaited = self.wanted if self.wanted is not None else self.asked
        if awaited is not None and not self.trouble:
            missing = ", ".join(sorted(self._hosts - self._pending[awaited].parts.keys())) or "its manifest"
            self.trouble = f"waits for checkpoint {awaited} of {missing}"
        unwritten, self._unwritten = sorted(self._unwritten), set()
        return asks + [command for step in unwritten for command in self._manifest(step)]

    def deadline(self) -> float | None:
        """When to ask again."""
        return self._repeat_at if self._pending else None

    def validate(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        for awaited in {self.wanted, self.asked, self._refused} - {None}:
            if awaited not in self._pending:
                raise InvariantError(f"checkpoint {awaited} of session {self._record.session} is wanted, and not under way")
        if not self._unwritten <= self._pending.keys():
            raise InvariantError(f"session {self._record.session} retries manifests of checkpoints that are not under way")

    def _begin(self, step: int, scaler: dict[str, int | float] | None, now: float) -> Pending:
        self._given_up.discard(step)
        if self._refused is not None and step > self._refused:
            self._give_up(self._refused)
        if not self._pending:
            self._repeat_at = now + REPEAT_AFTER
        pending = self._pending.setdefault(step, Pending(scaler))
        others = sorted(
            old for old in self._pending if old not in (step, self.wanted, self.asked) and self._pending[old].parts.keys() != self._hosts
        )
        for old in others[: max(0, len(self._pending) - UNDER_WAY)]:
            self._give_up(old)
        return pending

    def _let_go(self, step: int) -> None:
        """Training does not wait for it any more."""
        self.asked = None if step == self.asked else self.asked
        self._refused = None if step == self._refused else self._refused

    def _give_up(self, step: int) -> None:
        self._let_go(step)
        self._pending.pop(step, None)
        self._unwritten.discard(step)
        self._given_up.add(step)

    def _asks(self, now: float) -> list[Command]:
        self._repeat_at = now + REPEAT_AFTER
        step = self.wanted if self.wanted is not None else self.asked if self.asked is not None else max(self._pending)
        save = Save(self._record.session, self._record.epoch, step)
        missing = sorted(self._hosts - self._pending[step].parts.keys())
        return [Publish(subjects.command(pnode), save) for pnode in missing]

    def _manifest(self, step: int) -> list[Command]:
        pending = self._pending[step]
        if pending.scaler is None:
            raise InvariantError(f"checkpoint {step} of session {self._record.session} has every part and no scaler")
        parts = tuple(pending.parts[pnode] for pnode in sorted(pending.parts))
        return [WriteManifest(self._record, step, self._kernel, parts, pending.scaler)]


def retained(
    known: Sequence[CheckpointRecord], hyper: Hyper, needed: Collection[int | None]
) -> tuple[tuple[CheckpointRecord, ...], tuple[int, ...]]:
    """Of complete checkpoints those that a record goes on to list, by step, and the steps of those that are to be removed.

    `needed`: steps that stay in any case: the one that a deployment is starting from, that of the best validation that has one, those that
    are read.
    """
    known = sorted(known, key=lambda checkpoint: checkpoint.step)
    keeps = hyper.keeps([checkpoint.step for checkpoint in known])
    stay = [checkpoint for checkpoint in known if checkpoint.step in keeps or checkpoint.step in needed]
    gone = tuple(checkpoint.step for checkpoint in known if checkpoint not in stay)
    most = max(LISTED, hyper.keep_last)
    return (*(checkpoint for checkpoint in stay[:-most] if checkpoint.step in needed), *stay[-most:]), gone
