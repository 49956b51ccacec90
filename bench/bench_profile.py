"""Where does the time of a training step go?

Runs a shipped network's whole step (forward, backward, fold, decide, Adam) on one agent's executor, without a bus, with every backend
operation timed. The table has milliseconds per step, averaged over the shard threads, and the wall time of the step, which is what a
session on one agent cannot go below. Run: python bench/bench_profile.py [shakespeare_char_cpu|topology_1] [--steps N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

from bare_step import BareStep

from dcnr.backends.base import Backend
from dcnr.backends.load import load_backend

ROOT = Path(__file__).resolve().parent.parent
BATCH = {"shakespeare_char_cpu": 12, "topology_1": 4}
THREADS = 2
WARM_UP = 5


class Timed:
    """A backend whose operations are timed, per thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.seconds: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backend, name)
        if not callable(value):
            return value

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return value(*args, **kwargs)
            finally:
                with self._lock:
                    self.seconds[name] += time.perf_counter() - start

        self.__dict__[name] = timed
        return timed


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", nargs="?", default="shakespeare_char_cpu", choices=sorted(BATCH))
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    text = (ROOT / "networks" / f"{args.network}.yml").read_text().replace("precision: fp16", "precision: float32")
    timed = Timed(load_backend("cpu"))
    step = BareStep(cast("Backend", timed), text, BATCH[args.network], {"shards": THREADS}, THREADS)
    for _ in range(WARM_UP):
        step.run()
    timed.seconds.clear()
    walls = []
    for _ in range(args.steps):
        start = time.perf_counter()
        step.run()
        walls.append(time.perf_counter() - start)
    rows = sorted(timed.seconds.items(), key=lambda item: -item[1])
    table = "".join(f"| {name} | {seconds / args.steps / THREADS * 1e3:.2f} |\n" for name, seconds in rows if seconds > 1e-3)
    wall = statistics.median(walls) * 1e3
    sys.stdout.write(f"| operation | ms per step and thread |\n|---|---|\n{table}| **whole step, wall** | **{wall:.1f}** |\n")


if __name__ == "__main__":
    main()
