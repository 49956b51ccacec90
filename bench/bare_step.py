"""A training step without agents, bus and session: the executor of one agent, driven directly, on the same backend.

    python bench/bare_step.py 2 [--backend cupy] [--batch 128]

What a real session takes more than this is what orchestrator, NATS, session and the agent's own machine add. Waits for its turns (`turns`).
"""

from __future__ import annotations

import argparse
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from cases import CASES, needs
from turns import Fields, measure, take_turns

from dcnr.agents.commands import Pass
from dcnr.agents.crew import Crew
from dcnr.agents.ending import Later
from dcnr.agents.execution import Execution
from dcnr.agents.plan import make_plan
from dcnr.backends.base import Backend, HostArray
from dcnr.backends.load import load_backend
from dcnr.bus.messages import Deploy
from dcnr.ids import Epoch, NetworkId, PNodeId, SessionId
from dcnr.network.load import load_graph
from dcnr.optim.decide import FIRST_LOSS_SCALE, ScalerState
from dcnr.passes import prepare

BATCHES = 4
"""Different batches of ids, taken in turn."""
IN_FLIGHT = 3
"""Steps that are issued before the first of them must be done, as in a session."""
WARM_UP = 3

Hypers = Mapping[str, str | int | float | bool | None]
"""Fields of `optim.hyper.Hyper`."""


class BareStep:
    """The whole network of a file on one executor, whose shards may run on so many threads."""

    def __init__(self, backend: Backend, text: str, batch: int, hyper: Hypers, threads: int) -> None:
        self._backend = backend
        graph = prepare(load_graph(text, "bench"), fuse=True)
        me = PNodeId("bench")
        half = any("float16" in (node.param_precision, node.activation_precision) for node in graph.nodes)
        scaler = ScalerState(loss_scale=FIRST_LOSS_SCALE if half else 1.0, dynamic=half)
        self._deploy = Deploy(
            network=NetworkId(graph.name), session=SessionId("bench"), epoch=Epoch(1), network_file=text, fuse=True,
            assignment={node.id: me for node in graph.nodes}, peers=(), hyper=dict(hyper), state={**asdict(scaler)},
            seed=1, total_steps=1 << 30, micro_batches=1, batch=batch, step=0, storage="", checkpoint=None, decides=True,
        )  # fmt: skip
        plan = make_plan(self._deploy, me)
        (self._routes,) = plan.routes.segments
        self._execution = Execution(backend, Crew(threads), self._deploy, plan)
        self._execution.load(None)
        self._fed = _batches(needs(graph)[0], [(batch, *entry.shape) for entry in self._routes.inputs])
        self._step = 0
        self._pending: deque[Later[Any]] = deque()

    def run(self) -> None:
        """Issue the next step, and wait for one that is `IN_FLIGHT` steps old."""
        self._step += 1
        inputs = self._fed[self._step % BATCHES]
        weights = tuple(1.0 / inputs[0].size for _ in inputs)
        job = Pass(self._deploy.session, self._deploy.epoch, self._routes.index, self._step, 0, inputs, weights, ())
        self._pending += [self._execution.run(job), self._execution.settle(self._step)]
        while len(self._pending) > 2 * IN_FLIGHT:
            self._pending.popleft()()

    def wait(self) -> None:
        """Until everything is done."""
        while self._pending:
            self._pending.popleft()()
        self._backend.synchronize()


def _batches(vocabulary: int, shapes: list[tuple[int, ...]]) -> list[tuple[HostArray, ...]]:
    rng = np.random.default_rng(1)
    return [tuple(rng.integers(0, vocabulary, shape) for shape in shapes) for _ in range(BATCHES)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=sorted(CASES))
    parser.add_argument("--backend", default="cupy")
    parser.add_argument("--batch", type=int, help="rows of a step")
    parser.add_argument("--precision", help="of the network's file")
    args = parser.parse_args()
    case = CASES[args.network]
    backend = load_backend(args.backend)
    step = BareStep(backend, case.text(args.precision), args.batch or case.batch, case.hyper, os.cpu_count() or 1)
    for _ in range(WARM_UP):
        step.run()
    step.wait()

    def turn(steps: int) -> Fields:
        median, back_to_back = measure(step.run, step.wait, steps)
        return {"median_ms": median, "ms": back_to_back, "peak": backend.memory().used}

    take_turns({"backend": backend.name}, turn)


if __name__ == "__main__":
    main()
