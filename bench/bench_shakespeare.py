"""Question: does a network that learns Shakespeare by the character come out as good as published, and how long does it take?

    python bench/bench_shakespeare.py --text shakespeare.txt                         (4 blocks, 2,000 steps, on the cpu; published: 1.88)
    python bench/bench_shakespeare.py --text shakespeare.txt --size gpu              (6 blocks, 5,000 steps; published: 1.4697)
    python bench/bench_shakespeare.py --text shakespeare.txt --reference torch_shakespeare.py

The settings are those published with nanoGPT (`config/train_shakespeare_char.py`, and its CPU variant in the README): by character, the
last tenth of the text for validation, every `EVERY` steps. DCNR is used as anybody would: orchestrator, NATS and one agent; its
validation reads the whole split. `--batches 20` reads as much as was read for the published figure of the CPU, an estimate from 20 random
batches (of one PyTorch model 200 such estimates had a standard deviation of 0.014).

`--reference` is a script that trains the same in PyTorch and prints one JSON line with `ms`, `wall_s` and `best_val`; it runs after DCNR on
the same machine, as it is and with `--compile`, each with and without validation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcnr.bus.messages import StepMetrics, ValidationMetrics
from dcnr.cli.cluster import LocalCluster
from dcnr.client.cluster import Cluster, NetworkFile
from dcnr.client.connect import connect
from dcnr.client.follow import End
from dcnr.data.dataset import Dataset
from dcnr.text.tokenizer import Tokenizer, add_tokenizer

NETWORKS = Path(__file__).resolve().parent.parent / "networks"
NAME = "shakespeare"
EVERY = 250
"""Steps between two validations."""
HYPER: Mapping[str, str | int | float] = {
    "optimizer": "adamw", "lr": 1e-3, "min_lr": 1e-4, "schedule": "cosine", "warmup_steps": 100, "beta2": 0.99, "weight_decay": 0.1,
    "clip_norm": 1.0, "validate_every": EVERY,
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One of the published ones. `goal`: the validation loss to reach, in nats a character."""

    file: str
    precision: str
    backend: str
    seq_len: int
    batch: int
    steps: int
    goal: float

    @property
    def network(self) -> NetworkFile:
        """The shipped file, in this precision."""
        text = (NETWORKS / self.file).read_text(encoding="utf-8")
        return NetworkFile(text.replace("precision: float32", f"precision: {self.precision}", 1), self.file)


SETTINGS = {
    "cpu": Setting("shakespeare_char_cpu.yml", "float32", "cpu", 64, 12, 2000, 1.90),
    "gpu": Setting("shakespeare_char.yml", "bf16", "cupy", 256, 64, 5000, 1.48),
}


@dataclass(frozen=True)
class Outcome:
    """Of a run. `wall_s`: from the request to the end, the first compilation of kernels included."""

    steps: Sequence[StepMetrics]
    validations: Sequence[ValidationMetrics]
    wall_s: float

    @property
    def best(self) -> ValidationMetrics:
        """The validation with the smallest loss."""
        return min(self.validations, key=lambda one: one.loss)


async def train(setting: Setting, text: Path, seed: int, batches: int) -> Outcome:
    """Tokenizer, dataset, cluster and session, from nothing."""
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder)
        add_tokenizer(data_dir, NAME, Tokenizer.train([text], "char", 256))
        Dataset.create(data_dir, NAME, [text], NAME, validation=0.1, seq_len=setting.seq_len)
        async with LocalCluster(data_dir, 1, setting.backend) as local, connect(local.url) as cluster:
            return await local.run_beside(follow(cluster, setting, seed, batches), lambda line: print(line, file=sys.stderr))


async def follow(cluster: Cluster, setting: Setting, seed: int, batches: int) -> Outcome:
    """One session to its end."""
    steps: list[StepMetrics] = []
    validations: list[ValidationMetrics] = []
    start = time.perf_counter()
    hyper = {**HYPER, "validate_batches": batches}
    session = await cluster.train(setting.network, NAME, setting.steps, "run", batch=setting.batch, seed=seed, hyper=hyper)
    async for news in session.news():
        match news:
            case StepMetrics():
                steps.append(news)
            case ValidationMetrics():
                validations.append(news)
                print(f"step {news.step}: training {steps[-1].loss:.4f}, validation {news.loss:.4f}", file=sys.stderr, flush=True)
            case End(error=error) if error is not None:
                raise error
            case _:
                pass
    return Outcome(steps, validations, time.perf_counter() - start)


def reference(script: Path, size: str, text: Path, steps: int, *options: str) -> Mapping[str, Any]:
    """What the PyTorch script says of its run."""
    command = [sys.executable, str(script), "--data", str(text), "--size", size, "--steps", str(steps), *options]
    print(" ".join(command[1:]), file=sys.stderr, flush=True)
    fields: Mapping[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    return fields


# -- the report --------------------------------------------------------------------------------------------------------


def report(setting: Setting, seed: int, outcome: Outcome, references: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown."""
    best, tokens = outcome.best, setting.batch * setting.seq_len
    median = statistics.median(row.step_ms for row in outcome.steps)
    lines = [
        f"## {setting.file}, {setting.precision}, batch {setting.batch} × {setting.seq_len}, {setting.steps} steps, seed {seed}",
        "",
        f"{platform.machine()}, Python {platform.python_version()}; backend {setting.backend}, one agent",
        "",
        f"best validation loss **{best.loss:.4f}** at step {best.step} (to reach: {setting.goal}), perplexity {best.perplexity:.3f}, "
        f"{best.bits_per_byte:.4f} bits per byte, over {best.tokens:,} characters",
        "",
        "| side | best validation | wall time | median step | tokens/s, over all |",
        "|---|---|---|---|---|",
        _row("DCNR, with validation", best.loss, outcome.wall_s, median, tokens * setting.steps),
        *(_row(name, one["best_val"], one["wall_s"], one["ms"], tokens * setting.steps) for name, one in references.items()),
        "",
        "| step | training loss | validation loss |",
        "|---|---|---|",
        *(f"| {one.step} | {outcome.steps[one.step - 1].loss:.4f} | {one.loss:.4f} |" for one in outcome.validations),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, best: float | None, wall_s: float, ms: float, tokens: int) -> str:
    return f"| {name} | {'–' if best is None else f'{best:.4f}'} | {wall_s:.1f} s | {ms:.2f} ms | {tokens / wall_s:,.0f} |"


def main() -> None:
    """Command line. Exits with 1 if the loss to reach was not reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--size", choices=sorted(SETTINGS), default="cpu")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--batches", type=int, default=0, help="of a validation, from the start of the split (default: all of it)")
    parser.add_argument("--reference", type=Path, help="the same in PyTorch")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    setting = SETTINGS[args.size]
    outcome = asyncio.run(train(setting, args.text, args.seed, args.batches))
    references: dict[str, Mapping[str, Any]] = {}
    if args.reference is not None:
        for name, options in (("PyTorch eager", ()), ("torch.compile", ("--compile",))):
            for validated, more in ((", without validation", ()), (", with validation", ("--eval", str(EVERY)))):
                references[name + validated] = reference(args.reference, args.size, args.text, setting.steps, *options, *more)
    text = report(setting, args.seed, outcome, references)
    sys.stdout.write(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    sys.exit(outcome.best.loss > setting.goal)


if __name__ == "__main__":
    main()
