"""What must hold at the end of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcnr.bus.messages import StepMetrics, ValidationMetrics
from dcnr.optim.hyper import Hyper
from dcnr.orchestrator.state import SessionRecord, SessionState
from dcnr.storage.checkpoint import read_manifest, read_tensors
from tests.simulation.agent import Agent
from tests.simulation.networks import SESSION, Reference, reference
from tests.simulation.world import Broken, World


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to: two runs of one seed have the same."""

    actions: int
    seconds: float
    rows: int
    seen: str
    """Faults, and the remedies that were used."""


def told(seen: Counter[str]) -> str:
    """`again 3, back 1`."""
    return ", ".join(f"{what} {count}" for what, count in sorted(seen.items()) if count)


def check_end(world: World) -> Outcome:
    """Raise `Broken` unless the run gave what the undisturbed one gives, and left nothing behind."""
    record = world.record
    if record is None or record.state is not SessionState.DONE:
        raise Broken(f"the session is {world.where}")
    expected = reference(world.plan.variant, world.plan.last)
    _check_tensors(world, expected)
    _check_rows([row for row in world.rows if isinstance(row, StepMetrics)], expected)
    _check_validations(world, record, expected)
    for life in world.lives:
        if isinstance(life, Agent) and life.alive and life.machine.sessions:
            raise Broken(f"agent {life.name} still holds the session")
    return Outcome(world.scheduler.done, world.scheduler.now, len(world.rows), told(world.seen))


def _check_tensors(world: World, expected: Reference) -> None:
    manifest = world.now(read_manifest(world.disk, SESSION))
    if manifest.step != world.plan.last:
        raise Broken(f"the last checkpoint is of step {manifest.step}")
    found = world.now(read_tensors(world.disk, manifest, manifest.tensors))
    if found.keys() != expected.tensors.keys():
        raise Broken(f"other tensors: {sorted(found.keys() ^ expected.tensors.keys())}")
    wrong = [name for name in sorted(found) if not np.array_equal(found[name], expected.tensors[name])]
    if wrong:
        raise Broken(f"{len(wrong)} of {len(found)} tensors differ, as {wrong[0]}")


def _check_rows(rows: Sequence[StepMetrics], expected: Reference) -> None:
    """Whoever trained a step, and however often: it had that one loss. And of each step there is a row."""
    for row in rows:
        loss = expected.losses[row.step - 1]
        if row.loss != loss:
            raise Broken(f"step {row.step} of epoch {row.epoch} has loss {row.loss!r}, not {loss!r}")
    steps = {row.step for row in rows}
    if steps != set(range(1, len(expected.losses) + 1)):
        raise Broken(f"rows of steps {sorted(steps)}, not 1 to {len(expected.losses)}")


def _check_validations(world: World, record: SessionRecord, expected: Reference) -> None:
    """However often a step was validated, and wherever: it had that one loss. The best one is known, and its checkpoint is there, or that
    of one that was the best before it, if storage refused anything.
    """
    hyper, last = Hyper.model_validate(world.plan.hyper), world.plan.last
    validated = {step: loss for step, loss in enumerate(expected.validations, 1) if hyper.validates(step, world.plan.steps)}
    rows = [row for row in world.rows if isinstance(row, ValidationMetrics)]
    for row in rows:
        if row.loss != validated.get(row.step):
            raise Broken(f"step {row.step} of epoch {row.epoch} was validated to {row.loss!r}, not {validated.get(row.step)!r}")
    if {row.step for row in rows} != validated.keys():
        raise Broken(f"validations after steps {sorted({row.step for row in rows})}, not {sorted(validated)}")
    if not validated:
        return
    best, known = min(validated, key=lambda step: (validated[step], step)), record.validation
    if known is None or (known.upto, known.best_step, known.best_loss) != (last, best, validated[best]):
        raise Broken(f"the best validation is that of step {best}, not {known}")
    before = {step for step in validated if all(validated[step] < validated[other] for other in validated if other < step)}
    if record.kept != best and not (world.disk.refused and record.kept in before | {None}):
        raise Broken(f"the checkpoint of step {record.kept} is kept, not that of {best}, which validated best")
    if record.kept is not None and record.kept not in {checkpoint.step for checkpoint in record.checkpoints}:
        raise Broken(f"the checkpoint of step {record.kept}, which is to be kept, is not there")
