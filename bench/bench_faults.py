"""Question: what does safety cost while nothing happens, and how long does a fault stop the training?

    python bench/bench_faults.py [--rounds 3] [--faults 5] [--out bench/results/FILE.md]

Cost: mean step time with a checkpoint every 10 steps against that of a run without any, as whole programs (`dcnr train --local N`) that
take turns on the same cores. Recovery: `dcnr chaos` against a cluster of three agents (`dcnr up`, which starts again what was killed), from
the signal to the next step that was done.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 10
EVERY = 10
STEPS = 200
BATCH = 8
AGENTS = (1, 2)
KINDS = ("agent", "orchestrator", "nats")
NETWORK = ROOT / "networks" / "tiny.yml"


def dcnr(*arguments: str) -> list[str]:
    """The program."""
    return [sys.executable, "-m", "dcnr.cli.main", *arguments]


def rows(text: str) -> list[dict[str, Any]]:
    """What `--json` prints."""
    return [json.loads(line) for line in text.splitlines()]


def step_ms(data_dir: Path, text: Path, agents: int, every: int) -> float:
    """Mean step time of one run: a checkpoint hits only every tenth step, so a median would not see it."""
    command = dcnr("train", str(NETWORK), "--text", str(text), "--steps", str(STEPS + WARM_UP), "--batch", str(BATCH), "--json")
    command += ["--local", str(agents), "--backend", "cpu", "--data-dir", str(data_dir), "--set", f"checkpoint_every={every}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return statistics.mean(float(row["step_ms"]) for row in rows(done.stdout) if row["event"] == "step" and row["step"] > WARM_UP)


def cost(data_dir: Path, text: Path, rounds: int) -> str:
    """Markdown."""
    table = f"| agents | no checkpoints | every {EVERY} steps | cost |\n|---|---|---|---|\n"
    for agents in AGENTS:
        pairs = [(step_ms(data_dir, text, agents, 0), step_ms(data_dir, text, agents, EVERY)) for _ in range(rounds)]
        without, having = (statistics.median(column) for column in zip(*pairs, strict=True))
        table += f"| {agents} | {without:.2f} ms | {having:.2f} ms | {100 * (having / without - 1):+.1f} % |\n"
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--faults", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n\n"
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory) / "text.txt"
        text.write_text("".join(path.read_text(errors="ignore") for path in sorted(Path(os.__file__).parent.glob("*.py"))[:60]))
        report += cost(Path(directory) / "cost", text, args.rounds) + "\n" + recovery(Path(directory) / "faults", text, args.faults)
    sys.stdout.write(report)
    if args.out:
        args.out.write_text(report)


if __name__ == "__main__":
    main()
