"""How much Python does a VNode cost inside a segment?

A chain of element-wise nodes over a handful of numbers: what is measured is everything but arithmetic. Forward and backward of one
micro-batch, divided by the nodes; target: 20 µs per VNode for both together. Run: python bench/bench_segment.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise

import numpy as np

from dcnr.agents.commands import Pass
from dcnr.agents.crew import Crew
from dcnr.agents.execution import Execution
from dcnr.agents.plan import make_plan
from dcnr.backends.base import Backend
from dcnr.backends.load import load_backend
from dcnr.bus.messages import Deploy
from dcnr.ids import Epoch, NetworkId, NodeId, PNodeId, SessionId
from dcnr.network.load import load_graph
from dcnr.optim.decide import ScalerState
from dcnr.passes import prepare

ROWS, SEQ, DIM, VOCABULARY = 1, 2, 4, 8
SHORT, LONG = 20, 220
ROUNDS = 300


def chain(length: int) -> str:
    """A network file: embedder, `length` relus, cost."""
    nodes = [f"  - {{id: n{at}, type: relu, config: {{}}}}" for at in range(length)]
    names = ["embedder", *(f"n{at}" for at in range(length)), "head"]
    edges = [f"  - {{from: {source}, to: {target}}}" for source, target in pairwise(names)]
    return "\n".join(
        [
            "name: chain",
            "nodes:",
            "  - {id: embedder, type: embedder,",
            f"     config: {{vocab_size: {VOCABULARY}, dim: {DIM}, seq_len: {SEQ}, position_encoding: none}}}}",
            *nodes,
            f"  - {{id: head, type: linear, config: {{in_dim: {DIM}, out_dim: {VOCABULARY}}}}}",
            "  - {id: loss, type: cost, config: {cost_function: ce_logits}}",
            "edges:",
            *edges,
            "  - {from: head, to: loss}",
            "costs: [{name: ce, node_id: loss}]",
        ]
    )


def one_pass(backend: Backend, length: int) -> Callable[[], object]:
    """A function that runs forward and backward of one micro-batch through the whole chain."""
    text, me = chain(length), PNodeId("bench")
    graph = prepare(load_graph(text, "chain.yml"), fuse=False)
    deploy = Deploy(
        NetworkId("chain"), SessionId("bench"), Epoch(1), text, False, {node.id: me for node in graph.nodes}, (), {"shards": 1},
        {**asdict(ScalerState())}, 1, 1, 1, ROWS, 0, "", None, True,
    )  # fmt: skip
    plan = make_plan(deploy, me)
    execution = Execution(backend, Crew(1), deploy, plan)
    execution.load(None)
    routes = plan.routes.segments[0]
    ids = np.zeros((ROWS, SEQ), np.int64)
    inputs = tuple(ids for _ in routes.inputs)
    weights = tuple(1.0 if entry.consumers[0].node == NodeId("loss") else 0.0 for entry in routes.inputs)
    job = Pass(deploy.session, deploy.epoch, routes.index, 1, 0, inputs, weights, ())
    return lambda: execution.run(job)()


def microseconds(work: Callable[[], object]) -> float:
    """Time of the fastest call: whatever else the machine does only adds to it."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def of_operations(backend: Backend) -> float:
    """What the two operations of a node take by themselves."""
    x = backend.from_host(np.ones((ROWS, SEQ, DIM), np.float32))
    return microseconds(lambda: backend.activate("relu", x)) + microseconds(lambda: backend.activate_backward("relu", x, x))


def main() -> None:
    """Print one table."""
    print("| backend | µs per VNode, forward + backward | µs of that in its operations | µs of the chain without its nodes |")
    print("|---|---|---|---|")
    for name in ("numpy", "cpu"):
        backend = load_backend(name)
        short, long = microseconds(one_pass(backend, SHORT)), microseconds(one_pass(backend, LONG))
        per_node = (long - short) / (LONG - SHORT)
        print(f"| {name} | {per_node:.1f} | {of_operations(backend):.1f} | {short - SHORT * per_node:.0f} |")


if __name__ == "__main__":
    main()
