"""Question: what does safety cost while nothing happens, and how long does a fault stop the training?

    python bench/bench_faults.py [--faults 5] [--out bench/results/FILE.md]

Cost: in one run (`dcnr train --local N`) with a checkpoint every 20 steps, the mean time of the ten steps that follow one against that of
the ten after those: two runs differ by more than what is looked for. Recovery: `dcnr chaos` against a cluster of three agents (`dcnr up`,
which starts again what was killed), from the signal to the next step that was done.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EVERY = 10
BATCH = 8
KINDS = ("agent", "orchestrator", "nats")
NETWORK = ROOT / "networks" / "tiny.yml"


@dataclass(frozen=True)
class Case:
    """A run; the first twenty steps are not counted."""

    network: Path
    batch: int
    steps: int
    agents: int


CASES = (
    Case(NETWORK, BATCH, 1020, 1),
    Case(NETWORK, BATCH, 1020, 2),
    Case(ROOT / "networks" / "topology_1.yml", 4, 140, 1),
    Case(ROOT / "networks" / "topology_1.yml", 16, 60, 1),
)


def dcnr(*arguments: str) -> list[str]:
    """The program."""
    return [sys.executable, "-m", "dcnr.cli.main", *arguments]


def rows(text: str) -> list[dict[str, Any]]:
    """What `--json` prints."""
    return [json.loads(line) for line in text.splitlines()]


def step_ms(data_dir: Path, text: Path, case: Case) -> tuple[float, float]:
    """Mean milliseconds of a step in the ten after a checkpoint, which bear all of its cost, and in the ten after those."""
    command = dcnr("train", str(case.network), "--text", str(text), "--steps", str(case.steps), "--batch", str(case.batch), "--json")
    command += ["--local", str(case.agents), "--backend", "cpu", "--data-dir", str(data_dir), "--set", f"checkpoint_every={2 * EVERY}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    steps = {row["step"]: float(row["step_ms"]) for row in rows(done.stdout) if row["event"] == "step" and row["step"] > 2 * EVERY}
    near = [ms for step, ms in steps.items() if (step - 1) % (2 * EVERY) < EVERY]
    far = [ms for step, ms in steps.items() if (step - 1) % (2 * EVERY) >= EVERY]
    return statistics.mean(near), statistics.mean(far)


def cost(data_dir: Path, text: Path) -> str:
    """Markdown."""
    table = f"| network | agents | no checkpoint near | one every {EVERY} steps | cost |\n|---|---|---|---|---|\n"
    for case in CASES:
        having, without = step_ms(data_dir, text, case)
        name = f"{case.network.stem}, {case.batch} rows"
        table += f"| {name} | {case.agents} | {without:.1f} ms | {having:.1f} ms | {100 * (having / without - 1):+.1f} % |\n"
    return table


@contextmanager
def training(data_dir: Path, text: Path) -> Iterator[dict[str, str]]:
    """A cluster of three agents that trains on and on; the environment of commands for it."""
    up = subprocess.Popen(
        dcnr("up", "--agents", "3", "--backend", "cpu", "--port", "0", "--json", "--data-dir", str(data_dir)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert up.stdout is not None
    try:
        env = {**os.environ, "NATS_URL": json.loads(up.stdout.readline())["url"], "DCNR_DATA_DIR": str(data_dir)}
        train = subprocess.Popen(
            dcnr("train", str(NETWORK), "--text", str(text), "--steps", "10000000", "--batch", str(BATCH), "--json"),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert train.stdout is not None
        begun = json.loads(train.stdout.readline())
        train.kill()
        train.communicate()
        assert begun["event"] == "step"
        yield env
    finally:
        up.send_signal(signal.SIGINT)
        up.communicate()


def recovery(data_dir: Path, text: Path, faults: int) -> str:
    """Markdown."""
    table = "| killed | times | median | worst |\n|---|---|---|---|\n"
    with training(data_dir, text) as env:
        for kind in KINDS:
            command = dcnr("chaos", "--kill", kind, "--every", "5s", "--count", str(faults), "--seed", "1", "--json")
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=env, text=True)
            summary = rows(done.stdout)[-1]
            table += f"| {kind} | {summary['faults']} | {summary['median']:.1f} s | {summary['worst']:.1f} s |\n"
    return table


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n\n"
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory) / "text.txt"
        text.write_text("".join(path.read_text(errors="ignore") for path in sorted(Path(os.__file__).parent.glob("*.py"))[:60]))
        report += cost(Path(directory) / "cost", text) + "\n" + recovery(Path(directory) / "faults", text, args.faults)
    sys.stdout.write(report)
    if args.out:
        args.out.write_text(report)


if __name__ == "__main__":
    main()
