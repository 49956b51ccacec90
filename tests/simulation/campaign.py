"""Runs of seeds, one after the other; what failed is said with the command that repeats it."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field

from tests.simulation.checks import Outcome, check_end
from tests.simulation.disk import Now
from tests.simulation.faults import draw
from tests.simulation.world import World


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that did not end as it must."""

    seed: int
    why: str
    story: str

    def __str__(self) -> str:
        return f"python -m tests.simulation --seed {self.seed}    # {self.why}"


def run(seed: int, now: Now, trace: bool = False) -> tuple[World, Outcome]:
    """One run; raises whatever goes wrong."""
    world = World(draw(seed), now, trace)
    world.run()
    return world, check_end(world)


@dataclass(slots=True)
class Tally:
    """What a campaign saw."""

    runs: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)


def campaign(seeds: Iterable[int], seconds: float, tell: Callable[[Failure], None] = lambda _failure: None) -> Tally:
    """As many of the seeds as can be begun within `seconds`."""
    tally, until = Tally(), time.monotonic() + seconds
    with closing(Now()) as now:
        for seed in seeds:
            if time.monotonic() >= until:
                break
            tally.runs += 1
            try:
                world, _ = run(seed, now)
                tally.seen += world.seen
            except Exception as error:  # noqa: BLE001 - whatever it is, the campaign goes on and tells it
                why = f"{draw(seed).style}: {type(error).__name__}: {error}".splitlines()[0]
                tally.failures.append(Failure(seed, why[:300], traceback.format_exc()))
                tell(tally.failures[-1])
    return tally
