"""Question: does a training run on one backend have the losses of the same run on another, and of itself run again?

    python bench/bench_parity.py --text shakespeare.txt [--network networks/topology_1.yml] [--steps 200] [--batch 16]
    python bench/bench_parity.py --text README.md --network networks/tiny.yml --backend cpu --reference numpy --steps 20

Runs `dcnr train` three times through orchestrator, NATS and one agent: twice on `--backend`, once on `--reference`. Same seed, so the same
weights, batches and dropout masks; what differs is rounding, which training amplifies.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

SHOWN = (1, 2, 5, 10, 20, 50, 100, 150, 200, 500, 1000)
"""Steps in the table, as far as they were done; the last always is."""
HYPER = ("optimizer=adam", "lr=3e-4", "warmup_steps=50", "clip_norm=1", "loss_scale=1024", "shards=8")
"""Without spikes of the gradient: one that overflows half precision in one run, and just does not in the other, is a skipped step."""


class Run(NamedTuple):
    """Losses step by step, the skipped steps, and the seconds that all of it took."""

    losses: list[float]
    skipped: int
    seconds: float


def train(args: argparse.Namespace, backend: str, data: str) -> Run:
    """One run of the product; raises `SystemExit` with what it said if it fails."""
    command = [
        *(sys.executable, "-m", "dcnr.cli.main", "train", args.network, "--text", args.text, "--local", "1", "--backend", backend),
        *("--steps", str(args.steps), "--batch", str(args.batch), "--seed", "1", "--data-dir", data, "--json"),
        *(word for setting in HYPER for word in ("--set", setting)),
    ]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    rows = [row for row in map(json.loads, done.stdout.splitlines()) if row["event"] == "step"]
    return Run([row["loss"] for row in rows], sum(row["skipped"] for row in rows), time.perf_counter() - began)


def deviation(run: Run, reference: Run) -> list[float]:
    """Of each step, relative to the reference."""
    return [abs(loss - wanted) / wanted for loss, wanted in zip(run.losses, reference.losses, strict=True)]


def table(args: argparse.Namespace, first: Run, again: Run, reference: Run) -> str:
    """As Markdown."""
    apart = deviation(first, reference)
    steps = [step for step in SHOWN if step < len(apart)] + [len(apart)]
    lines = [
        f"## {Path(args.network).name}, {args.steps} steps of {args.batch} rows of {Path(args.text).name}\n",
        f"| step | {args.backend} | {args.reference} | relative difference |",
        "|---|---|---|---|",
        *(f"| {at} | {first.losses[at - 1]:.6f} | {reference.losses[at - 1]:.6f} | {apart[at - 1]:.1e} |" for at in steps),
        "",
        f"largest relative difference {max(apart):.1e}, mean {sum(apart) / len(apart):.1e};"
        f" skipped steps {first.skipped} and {reference.skipped}",
        f"two runs on {args.backend}: {'every loss equal to the last bit' if first.losses == again.losses else 'NOT EQUAL'}",
        f"seconds, all included: {first.seconds:.0f}, {again.seconds:.0f}, {reference.seconds:.0f}",
    ]
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="real text")
    parser.add_argument("--network", default="networks/topology_1.yml")
    parser.add_argument("--backend", default="cupy")
    parser.add_argument("--reference", default="cpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path, help="where to keep the table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as data:
        found = table(args, *(train(args, backend, data) for backend in (args.backend, args.backend, args.reference)))
    print(found)
    if args.out:
        args.out.write_text(found + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
