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
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np

from dcnr.agents.commands import Pass
from dcnr.agents.crew import Crew
from dcnr.agents.execution import Execution
from dcnr.agents.plan import make_plan
from dcnr.backends.base import Backend
from dcnr.backends.load import load_backend
from dcnr.bus.messages import Deploy
from dcnr.ids import Epoch, NetworkId, PNodeId, SessionId
from dcnr.network.graph import Graph
from dcnr.network.load import load_graph
from dcnr.optim.decide import ScalerState
from dcnr.passes import prepare

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


def steps_of(backend: Backend, text: str, graph: Graph, batch: int) -> Callable[[int], None]:
    """A function that runs step n of the whole network."""
    me = PNodeId("bench")
    homes: dict[str, PNodeId] = {node.id: me for node in graph.nodes}
    deploy = Deploy(
        NetworkId(graph.name), SessionId("bench"), Epoch(1), text, True, homes, (), {"shards": THREADS}, asdict(ScalerState()), 1, 1000, 1,
        batch, 0, "", None, True,
    )  # fmt: skip
    plan = make_plan(deploy, me)
    execution = Execution(backend, Crew(THREADS), deploy, plan)
    execution.load(None)
    (routes,) = plan.routes.segments
    vocabulary = graph.nodes[0].config.model_dump()["vocab_size"]
    rng = np.random.default_rng(1)

    def run(step: int) -> None:
        inputs = tuple(rng.integers(0, vocabulary, (batch, *entry.shape)) for entry in routes.inputs)
        weights = tuple(1.0 / inputs[0].size for _ in routes.inputs)
        execution.run(Pass(deploy.session, deploy.epoch, routes.index, step, 0, inputs, weights, ()))
        execution.settle(step)

    return run


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", nargs="?", default="shakespeare_char_cpu", choices=sorted(BATCH))
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    text = (ROOT / "networks" / f"{args.network}.yml").read_text().replace("precision: fp16", "precision: float32")
    graph = prepare(load_graph(text, args.network), fuse=True)
    timed = Timed(load_backend("cpu"))
    run = steps_of(cast("Backend", timed), text, graph, BATCH[args.network])
    for step in range(1, WARM_UP + 1):
        run(step)
    timed.seconds.clear()
    walls = []
    for step in range(WARM_UP + 1, WARM_UP + 1 + args.steps):
        start = time.perf_counter()
        run(step)
        walls.append(time.perf_counter() - start)
    rows = sorted(timed.seconds.items(), key=lambda item: -item[1])
    table = "".join(f"| {name} | {seconds / args.steps / THREADS * 1e3:.2f} |\n" for name, seconds in rows if seconds > 1e-3)
    wall = statistics.median(walls) * 1e3
    sys.stdout.write(f"| operation | ms per step and thread |\n|---|---|\n{table}| **whole step, wall** | **{wall:.1f}** |\n")


if __name__ == "__main__":
    main()
