"""What processes see of the world: its clock, server, storage and plan, and whom they tell what they are about to do."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from dcnr.agents.commands import Apply, Settle
from dcnr.bus.messages import StepMetrics, ValidationMetrics
from tests.simulation.disk import Disk, Now
from tests.simulation.faults import Plan
from tests.simulation.net import Net
from tests.simulation.process import AnyProcess
from tests.simulation.scheduler import Scheduler

Row = StepMetrics | ValidationMetrics


class Surroundings(Protocol):
    """The world, for those in it."""

    plan: Plan
    scheduler: Scheduler
    net: Net
    disk: Disk
    now: Now
    seen: Counter[str]
    """How often remedies were used."""
    storage_takes: float
    """Seconds that a write to storage takes at most."""

    def note(self, phase: str, process: AnyProcess) -> None:
        """`process` comes to `phase`; it may be dead when this returns."""
        ...

    def applies(self, agent: AnyProcess, job: Apply | Settle) -> None:
        """The weights of an agent are about to change."""
        ...

    def row(self, metric: Row) -> None:
        """A row of the training log, or of that of validations, was written."""
        ...

    def gone(self, process: AnyProcess) -> None:
        """`process` said good-bye."""
        ...
