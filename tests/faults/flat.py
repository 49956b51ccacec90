"""Does anything grow? Many steps with delays and churn: `python -m tests.faults.flat --steps 10000`.

Memory, file descriptors and subscriptions of every process that lives long enough are sampled; the last third is compared with the second.
Exit code 1 if anything grew. (Tasks of the event loops are counted in one process, by tests/faults/test_flat.)
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click
import psutil

from dcnr import log
from tests.faults.cluster import Cluster, Session, cluster, losses_of
from tests.faults.proxy import Weather

SAMPLE_EVERY = 2.0
CHURN_EVERY = 20.0
WEATHER = Weather(late=0.004, twice=0.002, overtaken=0.01)
ENOUGH = 12
"""Samples without which nothing can be said of a process."""
ROOM = {"memory": (1.1, 8 << 20), "descriptors": (1.0, 4), "subscriptions": (1.0, 2)}
"""By which factor, and by how much more than that, a median may grow."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one process at one moment."""

    memory: int
    descriptors: int
    subscriptions: int


class Samples:
    """By process: a new process of a name starts anew."""

    def __init__(self, one: Cluster) -> None:
        self._cluster = one
        self.of: dict[tuple[str, int], list[Sample]] = {}

    async def take(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(SAMPLE_EVERY)
            processes = self._cluster.processes
            for name in processes.names():
                self._add(name, processes.pid(name), name)
            if (pid := self._cluster.server_pid) is not None:
                self._add("nats-server", pid, "")

    def _add(self, name: str, pid: int, client: str) -> None:
        try:
            process = psutil.Process(pid)
            memory, descriptors = process.memory_info().rss, process.num_fds()
        except psutil.NoSuchProcess:
            return
        interests = sum(len(link.interests) for link in self._cluster.proxy.links(client))
        self.of.setdefault((name, pid), []).append(Sample(memory, descriptors, interests))


def growth(samples: list[Sample], what: str) -> tuple[float, float, bool]:
    """Medians of the second and the last third, and whether the last is more than it may be."""
    third = len(samples) // 3
    early, late = (statistics.median(getattr(sample, what) for sample in part) for part in (samples[third : 2 * third], samples[-third:]))
    factor, more = ROOM[what]
    return early, late, late > factor * early + more


async def churn(one: Cluster, session: Session, draw: random.Random) -> None:
    """Agents go and come, connections break; the first agent and the orchestrator live on."""
    while True:
        await asyncio.sleep(draw.uniform(0.5, 1.5) * CHURN_EVERY)
        kind = draw.choice(["kill", "cut", "stall"])
        if kind == "kill":
            one.processes.kill("agent-2")
            one.processes.again("agent-2")
        elif kind == "cut":
            one.proxy.cut(draw.choice(["agent-1", "orchestrator", ""]))
        else:
            one.proxy.stall()
            await asyncio.sleep(draw.uniform(0.5, 3.0))
            one.proxy.flow()
        click.echo(f"step {session.step}: {kind}")


async def measure(data_dir: Path, steps: int, seed: int) -> bool:
    """The whole run; whether all was flat."""
    async with cluster(data_dir, 2, seed=seed) as one:
        samples, draw = Samples(one), random.Random(seed)
        one.proxy.weather = WEATHER
        session = await one.session("flat", steps, 50)
        await session.until_step(1)
        beside = [asyncio.ensure_future(work) for work in (samples.take(), churn(one, session, draw))]
        began = time.monotonic()
        await session.until_state("done", within=steps * 1.0)
        for task in beside:
            task.cancel()
        for ended in await asyncio.gather(*beside, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), f"what went on beside the training broke: {ended!r}"
        assert sorted(losses_of(session)) == list(range(1, steps + 1))
        click.echo(f"{steps} steps in {time.monotonic() - began:.0f} s")
        return report(samples)


def report(samples: Samples) -> bool:
    """One table; whether something was measured, and nothing grew."""
    measured = {process: found for process, found in samples.of.items() if len(found) >= ENOUGH}
    flat = bool(measured)
    click.echo("| process | samples | memory MiB | descriptors | subscriptions |\n|---|---|---|---|---|")
    for (name, pid), found in measured.items():
        cells = []
        for what, unit in (("memory", 1 << 20), ("descriptors", 1), ("subscriptions", 1)):
            early, late, grew = growth(found, what)
            cells.append(f"{early / unit:.0f} → {late / unit:.0f}{' GREW' if grew else ''}")
            flat = flat and not grew
        click.echo(f"| {name} ({pid}) | {len(found)} | {' | '.join(cells)} |")
    return flat


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    options = parser.parse_args()
    log.configure(level="error")
    click.echo(f"seed {options.seed}")
    with tempfile.TemporaryDirectory(prefix="dcnr-flat-") as data_dir:
        flat = asyncio.run(measure(Path(data_dir), options.steps, options.seed))
    sys.exit(0 if flat else 1)


if __name__ == "__main__":
    main()
