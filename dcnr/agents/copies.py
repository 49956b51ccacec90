"""The copies of a session's state that a PNode keeps in host memory, and their way into storage.

Rule 1: the one of the newest complete checkpoint is what a rollback goes to; it stays, with the newer ones. Older ones go.
Rule 2: at most `KEPT` are kept: beyond that the oldest goes that is neither the newest complete one nor on its way.
Rule 3: one upload at a time, in the order of the steps; so however slow storage is, memory is bounded, and what it keeps up with is saved.
Rule 4: training never waits for storage: an upload that fails is said, its copy stays, and it is tried again when it is asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from dcnr.agents.commands import Command, SendReport, Tensors, Upload
from dcnr.bus.messages import Deploy, Saved, SavedPart, SaveFailed
from dcnr.errors import InvariantError
from dcnr.ids import PNodeId

KEPT = 3
REMEMBERED = 32
"""Uploads whose end can be said again."""
TOO_SLOW = "storage takes longer for one checkpoint than training for the next ones"


class Copy(NamedTuple):
    """The state after `step`: canonical tensors, and, where steps are decided here, the fields of the scaler's state."""

    step: int
    tensors: Tensors
    state: dict[str, int | float] | None


class Copies:
    """Of one (session, epoch). `inherited`: what an older epoch left of the state to begin with, more or less than is needed now."""

    def __init__(self, me: PNodeId, deploy: Deploy, inherited: Copy | None) -> None:
        self._me = me
        self._deploy = deploy
        self._kept: dict[int, Copy] = {inherited.step: inherited} if inherited else {}
        self._complete = deploy.step if deploy.checkpoint is not None else -1
        """The newest complete step that is known."""
        self._asked: set[int] = set()
        """Kept ones that are to be uploaded."""
        self._uploading: int | None = None
        self._saved: OrderedDict[int, Saved] = OrderedDict()

    def get(self, step: int) -> Copy | None:
        """The copy of a step, if it is kept."""
        return self._kept.get(step)

    def begin(self, tensors: Tensors | None) -> None:
        """The state to begin with: exactly what is needed of it; None if it was made from the seed. A newer one may be complete already."""
        self._kept.clear()
        if tensors is not None and self._deploy.step >= self._complete:
            self._keep(Copy(self._deploy.step, tensors, self._deploy.state if self._deploy.decides else None))

    def taken(self, copy: Copy) -> list[Command]:
        """Keep one more, and upload it."""
        crowded_out = self._keep(copy)
        self._asked.add(copy.step)
        return [*self._upload(), *(self._failed(step, TOO_SLOW) for step in crowded_out)]

    def save(self, step: int) -> list[Command] | None:
        """Upload the copy of `step`, or say again that it was; None if there is no copy."""
        if step in self._saved:
            return [self._report(self._saved[step])]
        if step not in self._kept:
            return None
        if step != self._uploading:
            self._asked.add(step)
        return self._upload()

    def complete(self, step: int) -> None:
        """Checkpoint `step` exists: what is older is of no use any more."""
        self._complete = max(self._complete, step)
        for older in [kept for kept in self._kept if kept < self._complete]:
            self._forget(older)

    def uploaded(self, step: int, part: SavedPart, state: dict[str, int | float] | None) -> list[Command]:
        """The part lies in storage."""
        self._uploading = None
        self._saved[step] = Saved(self._me, self._deploy.session, self._deploy.epoch, step, part, state)
        while len(self._saved) > REMEMBERED:
            self._saved.popitem(last=False)
        return [self._report(self._saved[step]), *self._upload()]

    def upload_failed(self, step: int, message: str) -> list[Command]:
        """Storage did not take the part."""
        self._uploading = None
        return [self._failed(step, message), *self._upload()]

    def validate(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        if len(self._kept) > KEPT or any(step < self._complete for step in self._kept) or not self._asked <= self._kept.keys():
            raise InvariantError(f"copies of {sorted(self._kept)}, {sorted(self._asked)} to upload, {self._complete} complete")

    def _keep(self, copy: Copy) -> list[int]:
        """Returns the steps that waited for their upload and had to go."""
        self._kept[copy.step] = copy
        surplus = sorted(self._kept.keys() - {self._complete, self._uploading})[: max(0, len(self._kept) - KEPT)]
        return [step for step in surplus if self._forget(step)]

    def _forget(self, step: int) -> bool:
        """Whether it still waited for its upload."""
        del self._kept[step]
        waited = step in self._asked
        self._asked.discard(step)
        return waited

    def _upload(self) -> list[Command]:
        """The next one, if none is on its way."""
        if self._uploading is not None or not self._asked:
            return []
        self._uploading = min(self._asked)
        self._asked.discard(self._uploading)
        copy = self._kept[self._uploading]
        return [Upload(self._deploy.session, self._deploy.epoch, copy.step, self._deploy.storage, copy.tensors, copy.state)]

    def _failed(self, step: int, message: str) -> Command:
        return self._report(SaveFailed(self._me, self._deploy.session, self._deploy.epoch, step, message))

    def _report(self, report: Saved | SaveFailed) -> Command:
        return SendReport(self._deploy.network, report)
