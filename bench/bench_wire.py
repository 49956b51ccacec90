"""What does rounding on the wire cost in loss, and what does it save in bytes?

    python bench/bench_wire.py [--network networks/shakespeare_char_cpu.yml] [--steps 300] [--batch 8] [--out bench/results/FILE.md]

The same network, text and seed, trained by an orchestrator and two agents over NATS, once for each `wire`; all that differs is what
the hops between the agents look like. The text is Python's own standard library, in characters. Bytes are those of the hops' payloads,
counted on the bus. `apart` is the largest difference of the loss of any step from the native run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcnr.bus import codec, subjects
from dcnr.bus.api import call
from dcnr.bus.base import Bus
from dcnr.bus.messages import TRAINER, Hop, SessionMetrics, StepMetrics
from dcnr.bus.nats import connect
from dcnr.bus.server import NatsServer
from dcnr.data.dataset import Dataset
from dcnr.errors import BusUnavailable, WorldError
from dcnr.ids import SessionId
from dcnr.network.load import load_graph
from dcnr.text.tokenizer import Tokenizer, add_tokenizer

ROOT = Path(__file__).resolve().parent.parent
WIRES = ("native", "fp16", "int8")
LAST = 20
"""Steps whose mean loss is shown."""
HYPER = {"optimizer": "adamw", "lr": 1e-3, "beta2": 0.99, "weight_decay": 0.1, "clip_norm": 1.0}
SESSION = SessionId("wire")


@dataclass
class Run:
    """What was heard of one run."""

    losses: list[float]
    nbytes: int = 0
    seconds: float = 0.0
    over: str = ""

    def on_hop(self, data: bytes) -> None:
        """Count what agents send to each other."""
        hop, _ = codec.decode_with_payload(data)
        if isinstance(hop, Hop) and hop.source != TRAINER:
            self.nbytes += hop.nbytes

    def on_metric(self, data: bytes) -> None:
        """Steps, and the end."""
        match codec.decode(data):
            case StepMetrics() as row:
                self.losses.append(row.loss)
            case SessionMetrics(state=state, reason=reason) if state in ("done", "failed", "suspended"):
                self.over = f"{state} {reason}"


@asynccontextmanager
async def process(*command: str) -> AsyncIterator[None]:
    """A process of DCNR, until the end of the block."""
    started = await asyncio.create_subprocess_exec(sys.executable, "-m", *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        started.terminate()
        await started.wait()


async def answered(bus: Bus, pnodes: int) -> None:
    """Wait until the API knows so many agents."""
    while True:
        try:
            if len((await call(bus, "pnode.list"))["pnodes"]) == pnodes:
                return
        except (BusUnavailable, WorldError):
            pass
        await asyncio.sleep(0.05)


async def train(wire: str, source: str, data_dir: Path, steps: int, batch: int) -> Run:
    """One whole session."""
    server, run = NatsServer(data_dir / "nats"), Run([])
    async with AsyncExitStack() as stack:
        await server.start()
        stack.push_async_callback(server.stop)
        bus = await connect(server.url, "bench")
        stack.push_async_callback(bus.close)
        await stack.enter_async_context(process("dcnr.cli.main", "orchestrator", "--nats", server.url, "--data-dir", str(data_dir)))
        for name in ("agent-1", "agent-2"):
            await stack.enter_async_context(process("dcnr.agents.main", "--nats", server.url, "--name", name, "--backend", "cpu"))
        for phase in ("fwd", "bwd"):
            await bus.subscribe(f"dcnr.net.*.*.{phase}", run.on_hop)
        for kind in ("step", "session"):
            await bus.subscribe(subjects.metrics("step" if kind == "step" else "session", SESSION), run.on_metric)
        async with asyncio.timeout(60):
            await answered(bus, 2)
        name = load_graph(source, "network").name
        await call(bus, "network.create", file=f"wire: {wire}\n{source}", file_name=f"{name}.yml")
        start = time.perf_counter()
        options: dict[str, Any] = {"steps": steps, "batch": batch, "micro_batches": 2, "seed": 1, "pnodes": 2, "hyper": HYPER}
        await call(bus, "session.create", network=name, dataset="text", session=SESSION, **options)
        while not run.over:
            await asyncio.sleep(0.05)
        run.seconds = time.perf_counter() - start
    if not run.over.startswith("done"):
        raise SystemExit(f"{wire}: {run.over}")
    return run


def make_dataset(data_dir: Path, source: str) -> None:
    """As many different characters as the network has words, in windows of its length."""
    graph = load_graph(source, "network")
    embedder = next(node for node in graph.nodes if node.type == "embedder")
    seq_len, vocabulary = embedder.input_shapes[0][0], int(embedder.config.model_dump()["vocab_size"])
    text = "".join(path.read_text(errors="ignore") for path in sorted(Path(os.__file__).parent.glob("*.py"))[:120])
    common = set(sorted(set(text), key=lambda one: -text.count(one))[: min(65, vocabulary)])
    file = data_dir / "text.txt"
    file.write_text("".join(one for one in text if one in common))
    add_tokenizer(data_dir, "chars", Tokenizer.train([file], "char"))
    Dataset.create(data_dir, "text", [file], "chars", seq_len=seq_len)


def report(network: str, runs: dict[str, Run], steps: int, batch: int) -> str:
    """Markdown."""
    native = runs["native"]
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    lines = [
        f"`{network}`, {steps} steps of {batch} sequences in 2 micro-batches, 2 agents; {machine}",
        "",
        f"| wire | loss of the last {LAST} steps | apart | between the agents, a step | of native |",
        "|---|---|---|---|---|",
    ]
    for wire, run in runs.items():
        loss = sum(run.losses[-LAST:]) / LAST
        apart = max(abs(one - other) for one, other in zip(run.losses, native.losses, strict=True))
        share = run.nbytes / native.nbytes
        lines.append(f"| {wire} | {loss:.4f} | {apart:.4f} | {run.nbytes / steps / 1e6:.3f} MB | {share:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", type=Path, default=ROOT / "networks" / "shakespeare_char_cpu.yml")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    source = args.network.read_text()
    runs = {}
    for wire in WIRES:
        with tempfile.TemporaryDirectory() as directory:
            make_dataset(Path(directory), source)
            runs[wire] = asyncio.run(train(wire, source, Path(directory), args.steps, args.batch))
    text = report(args.network.name, runs, args.steps, args.batch)
    sys.stdout.write(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
