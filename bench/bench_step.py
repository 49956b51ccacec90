"""Question: is a training step through orchestrator, NATS and agents as fast as the same network in plain PyTorch?

    python bench/bench_step.py [--rounds 2] [--out bench/results/FILE.md]

Each round runs PyTorch, DCNR on one agent and DCNR on two agents after one another on the same cores, as whole programs
(`dcnr train --local N --json`); the table gives medians over the rounds and the ratio of medians. Needs the `test` extra (torch).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 10


@dataclass(frozen=True)
class Case:
    """One network and how to train it."""

    network: str
    batch: int
    steps: int
    hyper: tuple[str, ...]


CASES = (
    Case("shakespeare_char_cpu", 12, 200, ("optimizer=adamw", "lr=1e-3", "beta2=0.99", "weight_decay=0.1", "clip_norm=1.0")),
    Case("topology_1", 4, 16, ("optimizer=adamw", "lr=3e-4", "beta2=0.99", "weight_decay=0.1")),
)


def environment() -> dict[str, str]:
    """Both sides alike, without settings that slow a current OpenBLAS down."""
    return {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}


def torch_step_ms(case: Case) -> float:
    """Median step of the reference."""
    command = [sys.executable, str(ROOT / "bench/reference_torch.py"), case.network, "--steps", str(case.steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
    return float(json.loads(done.stdout.splitlines()[-1])["step_ms"])


def dcnr_step_ms(case: Case, agents: int, data_dir: Path, text: Path) -> float:
    """Median of the step times that the session reports."""
    file = data_dir / f"{case.network}.yml"
    source = (ROOT / "networks" / f"{case.network}.yml").read_text()
    file.write_text(source.replace("precision: fp16", "precision: float32"))
    command = [sys.executable, "-m", "dcnr.cli.main", "train", str(file), "--text", str(text), "--json"]
    command += ["--steps", str(case.steps + WARM_UP), "--batch", str(case.batch), "--micro-batches", "1"]
    command += ["--local", str(agents), "--backend", "cpu", "--data-dir", str(data_dir)]
    for setting in case.hyper:
        command += ["--set", setting]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return statistics.median(float(row["step_ms"]) for row in rows if row["event"] == "step" and row["step"] > WARM_UP)


def corpus(directory: Path, case: Case) -> Path:
    """Python's own standard library source; for the character network only its first 65 different characters."""
    text = "".join(p.read_text(errors="ignore") for p in sorted(Path(os.__file__).parent.glob("*.py"))[:120])
    if case.network.startswith("shakespeare"):
        common = [c for c, _ in sorted(((c, text.count(c)) for c in set(text)), key=lambda item: -item[1])][:65]
        text = "".join(c for c in text if c in set(common))
    path = directory / f"{case.network}.txt"
    path.write_text(text)
    return path


def table(rows: list[tuple[str, float, float, float]]) -> str:
    """Markdown."""
    head = "| network | PyTorch eager | 1 agent | ratio | 2 agents | ratio |\n|---|---|---|---|---|---|\n"
    return head + "".join(
        f"| {name} | {torch:.1f} ms | {one:.1f} ms | {one / torch:.2f} | {two:.1f} ms | {two / torch:.2f} |\n"
        for name, torch, one, two in rows
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for case in CASES:
            text = corpus(Path(directory), case)
            samples: list[tuple[float, float, float]] = []
            for _ in range(args.rounds):
                one = dcnr_step_ms(case, 1, Path(directory), text)
                samples.append((torch_step_ms(case), one, dcnr_step_ms(case, 2, Path(directory), text)))
            torch, one, two = (statistics.median(column) for column in zip(*samples, strict=True))
            rows.append((case.network, torch, one, two))
    report = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n\n" + table(rows)
    sys.stdout.write(report)
    if args.out:
        args.out.write_text(report)


if __name__ == "__main__":
    main()
