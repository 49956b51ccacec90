"""One session, and fault after fault while it trains: `python -m tests.faults.chaos --faults 100 --seed 7`.

Three agents, two orchestrators and a server, all real processes, behind a bad network. Kinds and moments are drawn from the seed. At the
end the session is suspended, and a run that nothing disturbs is trained as far: the weights must be the same, bit for bit. Exit code 1 if
not, or if training did not go on after a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import click

from dcnr import log
from tests.acceptance.running import same_bits
from tests.faults.cluster import Cluster, Session, cluster, losses_of
from tests.faults.moments import PHASES, Trap
from tests.faults.proxy import BOTH, Weather

AGENTS, PNODES = 3, 2
FOREVER = 10_000_000
EVERY = 20
LIMIT = 60.0
"""Seconds within which training must go on."""
CALM = Weather(late=0.004)
"""Between faults: slow enough that a run of minutes can be done again without faults."""
AGAIN = 3
"""Steps beyond the one at the fault: fewer may have been under way."""

LAST = 100
"""Rows that are looked at: no more come between two looks."""

Choice = Callable[["Chaos"], Awaitable[str]]
"""Whom to strike."""
Strike = Callable[["Chaos"], Awaitable[float]]
"""Does one fault; returns the moment from which on training may be expected again."""


class Chaos:
    """The cluster, its session, and what is drawn."""

    def __init__(self, one: Cluster, session: Session, seed: int) -> None:
        self.cluster = one
        self.session = session
        self.draw = random.Random(seed)
        self.times: dict[str, list[float]] = {}

    async def strike(self, kind: str) -> float:
        """One fault; the seconds until training went on, with everything mended afterwards."""
        before, epoch = self.session.step, self.epoch
        since = await KINDS[kind](self)

        def trained() -> list[float]:
            return [at for at, row in self.session.rows[-LAST:] if at > since and (row.step >= before + AGAIN or row.epoch > epoch)]

        self.session.check()
        await self.cluster.until(lambda: bool(trained()), f"{self.session} trains again after: {kind}", LIMIT)
        self.session.check()
        took = trained()[0] - since
        self.times.setdefault(kind, []).append(took)
        await self.mend()
        return took

    @property
    def epoch(self) -> int:
        """Of the newest step."""
        return self.session.rows[-1][1].epoch if self.session.rows else 0

    async def mend(self) -> None:
        """Calm, and everybody there."""
        self.cluster.proxy.tap, self.cluster.proxy.weather = None, CALM
        self.cluster.proxy.flow()
        dead = [name for name in ALL if not self.cluster.processes.runs(name)]
        for name in ALL:
            if name in dead:
                self.cluster.processes.again(name)
            else:
                self.cluster.processes.signal(name, signal.SIGCONT)
        await self.cluster.until_some_alive(AGENTS)

    async def host(self) -> str:
        """An agent that holds a part, drawn."""
        found = [name for name in await self.session.hosts() if self.cluster.processes.runs(name)]
        return self.draw.choice(found or list(AGENT_NAMES))

    async def leader(self) -> str:
        """The orchestrator that leads."""
        return await self.cluster.leader()


AGENT_NAMES = tuple(f"agent-{number + 1}" for number in range(AGENTS))
ORCHESTRATOR_NAMES = ("orchestrator-1", "orchestrator-2")
ALL = (*ORCHESTRATOR_NAMES, *AGENT_NAMES)


async def kill_in_phase(chaos: Chaos) -> float:
    """An agent, in a phase of a step that is drawn."""
    victim, processes = await chaos.host(), chaos.cluster.processes
    trap = Trap(chaos.cluster.proxy, chaos.draw.choice(PHASES), chaos.session.step + 1, lambda _: processes.kill(victim))
    await chaos.cluster.until(lambda: trap.sprung_at is not None, "the phase comes")
    return trap.sprung_at or 0.0


def kill(whom: Choice) -> Strike:
    """One of them, at any moment."""

    async def strike(chaos: Chaos) -> float:
        chaos.cluster.processes.kill(await whom(chaos))
        return time.monotonic()

    return strike


def kill_all(names: Sequence[str]) -> Strike:
    """All at once; they are started again at once too."""

    async def strike(chaos: Chaos) -> float:
        for name in names:
            chaos.cluster.processes.kill(name)
        for name in names:
            chaos.cluster.processes.again(name)
        return time.monotonic()

    return strike


def stop(whom: Choice, longest: float) -> Strike:
    """For as long as it takes to be given up, or not quite: it wakes up as a zombie, or goes on."""

    async def strike(chaos: Chaos) -> float:
        victim, began = await whom(chaos), time.monotonic()
        chaos.cluster.processes.signal(victim, signal.SIGSTOP)
        await asyncio.sleep(chaos.draw.uniform(0.5, longest))
        chaos.cluster.processes.signal(victim, signal.SIGCONT)
        return began

    return strike


async def end_agent(chaos: Chaos) -> float:
    """In order."""
    victim, began = await chaos.host(), time.monotonic()
    chaos.cluster.processes.signal(victim, signal.SIGTERM)
    await asyncio.to_thread(chaos.cluster.processes.wait, victim, LIMIT)
    return began


async def kill_server(chaos: Chaos) -> float:
    """And start it again on its store."""
    chaos.cluster.kill_server()
    await asyncio.sleep(chaos.draw.uniform(0.0, 4.0))
    await chaos.cluster.restart_server()
    return time.monotonic()


async def cut_all(chaos: Chaos) -> float:
    """Every connection."""
    chaos.cluster.proxy.cut()
    return time.monotonic()


async def cut_one(chaos: Chaos) -> float:
    """Those of one process."""
    chaos.cluster.proxy.cut(chaos.draw.choice(ALL))
    return time.monotonic()


async def deafen(chaos: Chaos) -> float:
    """One process, in one direction, until its connection is given up."""
    chaos.cluster.proxy.deafen(chaos.draw.choice(BOTH), chaos.draw.choice(ALL))
    return time.monotonic()


async def stall(chaos: Chaos) -> float:
    """Nothing moves for a while."""
    chaos.cluster.proxy.stall()
    await asyncio.sleep(chaos.draw.uniform(0.5, 5.0))
    chaos.cluster.proxy.flow()
    return time.monotonic()


def storm(**weather: float) -> Strike:
    """Some seconds of bad weather."""

    async def blow(chaos: Chaos) -> float:
        chaos.cluster.proxy.weather = Weather(**weather)
        await asyncio.sleep(chaos.draw.uniform(2.0, 5.0))
        chaos.cluster.proxy.weather = CALM
        return time.monotonic()

    return blow


KINDS: Mapping[str, Strike] = {
    "agent killed in a phase": kill_in_phase,
    "agent killed": kill(Chaos.host),
    "all agents killed": kill_all(AGENT_NAMES),
    "agent ended": end_agent,
    "agent stopped": stop(Chaos.host, 6.0),
    "leader killed": kill(Chaos.leader),
    "orchestrators killed": kill_all(ORCHESTRATOR_NAMES),
    "leader stopped": stop(Chaos.leader, 8.0),
    "server killed": kill_server,
    "all connections cut": cut_all,
    "one process cut off": cut_one,
    "one direction dead": deafen,
    "nothing moves": stall,
    "5 % lost": storm(loss=0.05),
    "twice and overtaken": storm(twice=0.05, overtaken=0.05),
    "late": storm(late=0.03),
    "everything at once": storm(loss=0.02, twice=0.02, overtaken=0.02, late=0.01),
}


def kinds_of(wanted: str | None, faults: int, draw: random.Random) -> list[str]:
    """What comes: each kind as often as the others, in a drawn order."""
    allowed = [kind for kind in KINDS if wanted is None or kind in wanted.split(",")]
    found = [allowed[index % len(allowed)] for index in range(faults)]
    draw.shuffle(found)
    return found


async def storms(one: Cluster, options: argparse.Namespace) -> bool:
    """The whole run; whether the weights are the same."""
    network = await register(one, options.topology) if options.topology else {}
    session = await one.session("chaos", FOREVER, EVERY, PNODES, **network)
    await session.until_step(1)
    chaos = Chaos(one, session, options.seed)
    await chaos.mend()
    began = time.monotonic()
    for number, kind in enumerate(kinds_of(options.kinds, options.faults, chaos.draw), 1):
        took = await chaos.strike(kind)
        click.echo(f"{number:4}  {time.monotonic() - began:6.0f} s  step {session.step:6}  {kind:24} {took:5.1f} s")
        await asyncio.sleep(chaos.draw.uniform(0.2, 1.5))
    one.proxy.weather = Weather()
    await session.ask("suspend")
    await session.until_state("suspended")
    step = (await session.ask("show"))["checkpoints"][-1]
    losses = losses_of(session)
    click.echo(f"{step} steps; the same number of steps without faults …")
    calm = await one.session("calm", step, 0, 1, **network)
    await calm.until_state("done", within=3600)
    same = same_bits(await session.tensors(step), await calm.tensors(step))
    same_losses = all(losses[row.step] == row.loss for _, row in calm.rows if row.step in losses)
    click.echo(table(chaos.times))
    click.echo(f"weights bit-equal: {same}; losses of the {len(losses)} steps that were heard bit-equal: {same_losses}")
    return same and same_losses


async def register(one: Cluster, file: Path) -> dict[str, str]:
    """Another network."""
    name = (await one.ask("network.create", file=file.read_text(), file_name=file.name, replace=True))["name"]
    return {"network": str(name)}


def table(times: Mapping[str, list[float]]) -> str:
    """Per kind: how many, and the median and worst time until training went on."""
    lines = ["| fault | count | median | worst |", "|---|---|---|---|"]
    rows = [*times.items(), ("all", [took for found in times.values() for took in found])]
    lines += [f"| {kind} | {len(found)} | {statistics.median(found):.1f} s | {max(found):.1f} s |" for kind, found in rows]
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--kinds", help="only these, comma-separated: " + ", ".join(KINDS).replace("%", "%%"))
    parser.add_argument("--topology", type=Path, help="a network file instead of the small one")
    options = parser.parse_args()
    if options.kinds and (unknown := sorted(set(options.kinds.split(",")) - KINDS.keys())):
        parser.error(f"there is no kind {', '.join(unknown)}")
    log.configure(level="error")
    click.echo(f"seed {options.seed}")

    async def run(data_dir: Path) -> bool:
        async with cluster(data_dir, AGENTS, len(ORCHESTRATOR_NAMES), options.seed) as one:
            return await storms(one, options)

    with tempfile.TemporaryDirectory(prefix="dcnr-chaos-") as data_dir:
        same = asyncio.run(run(Path(data_dir)))
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
