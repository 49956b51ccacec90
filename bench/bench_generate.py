"""Question: how fast is a token, with and without the key/value cache, behind prompts of several lengths?

    python bench/bench_generate.py [--backend cupy] [--networks topology_1] [--tokens 64] [--out bench/results/FILE.md]

"bare" is the forward of one agent, driven directly in this process; the others go through orchestrator, NATS and 1 or 3 agents, as anybody
asks for text, at temperature 0. Rates are of all tokens but the first, whose time stands by itself: it reads the prompt. The networks
are hardly trained: that changes no time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dcnr.agents.commands import Read
from dcnr.agents.forward import Forward
from dcnr.agents.plan import make_plan
from dcnr.backends.base import Backend
from dcnr.backends.load import load_backend
from dcnr.bus.messages import Deploy
from dcnr.cli.cluster import LocalCluster
from dcnr.client.cluster import Cluster, NetworkFile
from dcnr.client.connect import connect
from dcnr.data.dataset import Dataset
from dcnr.ids import Epoch, NetworkId, PNodeId, SessionId
from dcnr.network.graph import Graph
from dcnr.network.instantiate import instantiate
from dcnr.network.load import load_graph
from dcnr.nodes.initial import initial_value
from dcnr.orchestrator.feed import feeds_of
from dcnr.passes import prepare
from dcnr.text.tokenizer import Tokenizer, add_tokenizer

NETWORKS = Path(__file__).resolve().parent.parent / "networks"
NAME = "bench"
CHARACTERS = 65
"""Of the text: no network here has a smaller vocabulary."""
AGENTS = (1, 3)


@dataclass(frozen=True)
class Rate:
    """Seconds until the first token, and tokens a second from then on."""

    first_s: float
    per_s: float

    @classmethod
    def of(cls, start: float, times: Sequence[tuple[float, int]]) -> Rate:
        """`times`: when, and how many tokens there were by then. They may have come all at once."""
        (begin, some), (end, all_) = times[0] if len(times) > 1 else (start, 0), times[-1]
        return cls(times[0][0] - start, (all_ - some) / (end - begin))


class BareForward:
    """The whole network on one executor; what comes next is the likeliest."""

    def __init__(self, backend: Backend, text: str) -> None:
        graph, me = prepare(load_graph(text, NAME), fuse=True, purpose="generate"), PNodeId(NAME)
        self._deploy = Deploy(
            network=NetworkId(NAME), session=SessionId(NAME), epoch=Epoch(1), network_file=text, fuse=True,
            assignment={node.id: me for node in graph.nodes}, peers=(), hyper={}, state={}, seed=1, total_steps=0, micro_batches=1,
            batch=1, step=0, storage="", checkpoint="key", decides=False, purpose="generate", reader=PNodeId("reader"),
        )  # fmt: skip
        plan = make_plan(self._deploy, me)
        self._inputs = len(plan.routes.segments[0].inputs)
        self._forward = Forward(backend, plan)
        self._forward.load(_weights(graph))

    def rate(self, prompt: Sequence[int], tokens: int, caches: bool) -> Rate:
        """`tokens` ids behind `prompt`, one after the other."""
        ids, times, start = list(prompt), [], time.perf_counter()
        for made in range(1, tokens + 1):
            position = len(ids) - 1 if caches and made > 1 else 0
            ids.append(self._next(ids[position:], position, caches))
            times.append((time.perf_counter(), made))
        return Rate.of(start, times)

    def _next(self, ids: Sequence[int], position: int, caches: bool) -> int:
        inputs = (np.array([ids], np.int64),) * self._inputs
        (handoff,) = self._forward.read(Read(self._deploy.session, self._deploy.epoch, 0, 0, 0, position, caches, inputs))()
        assert handoff.host is not None
        return int(np.argmax(np.asarray(handoff.host, np.float32)[0, -1, :CHARACTERS]))


def _weights(graph: Graph) -> dict[str, np.ndarray]:
    parameters = (parameter for node in graph.nodes for parameter in instantiate(node).parameters)
    return {
        f"{part.node}.{part.name}": initial_value(1, parameter)[part.start : part.stop]
        for parameter in parameters
        for part in parameter.parts
    }


async def cluster_rates(
    backend: str, agents: int, text: str, corpus: Path, prompts: Sequence[int], tokens: int
) -> dict[tuple[int, bool], Rate]:
    """By length of the prompt and use of the cache: through a cluster of its own."""
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder)
        add_tokenizer(data_dir, NAME, Tokenizer.train([corpus], "char", 256))
        Dataset.create(data_dir, NAME, [corpus], NAME, seq_len=feeds_of(prepare(load_graph(text, NAME), fuse=False)).seq_len)
        async with LocalCluster(data_dir, agents, backend, port=0) as local, connect(local.url) as cluster:
            asked = _rates(cluster, agents, text, corpus, prompts, tokens)
            return await local.run_beside(asked, lambda line: print(line, file=sys.stderr))


async def _rates(
    cluster: Cluster, agents: int, text: str, corpus: Path, prompts: Sequence[int], tokens: int
) -> dict[tuple[int, bool], Rate]:
    session = await cluster.train(NetworkFile(text, f"{NAME}.yml"), NAME, 1, "run", batch=1)
    await session.wait()
    whole, found = corpus.read_text(encoding="utf-8"), {}
    for length in prompts:
        for caches in (True, False):
            for count in (2, tokens):  # the first compiles
                start, times = time.perf_counter(), []
                asked = {"session": "run", "prompt": whole[:length], "temperature": 0.0, "max_tokens": count}
                async for piece in cluster.pieces(**asked, cache=caches, pnodes=agents):
                    times += [(time.perf_counter(), piece.tokens)] if piece.tokens else []
            found[length, caches] = Rate.of(start, times)
    return found


def bare_rates(backend: Backend, text: str, prompts: Sequence[int], tokens: int) -> dict[tuple[int, bool], Rate]:
    """The same without a cluster."""
    forward = BareForward(backend, text)
    ids = np.random.default_rng(1).integers(0, CHARACTERS, max(prompts)).tolist()
    found = {}
    for length in prompts:
        for caches in (True, False):
            forward.rate(ids[:length], 2, caches)
            found[length, caches] = forward.rate(ids[:length], tokens, caches)
    return found


def corpus_in(folder: Path) -> Path:
    """Python's own standard library, as far as its commonest characters go."""
    text = "".join(path.read_text(errors="ignore") for path in sorted(Path(os.__file__).parent.glob("*.py"))[:20])
    common = {character for character, _ in Counter(text).most_common(CHARACTERS)}
    path = folder / "corpus.txt"
    path.write_text("".join(character for character in text if character in common), encoding="utf-8")
    return path


def rows(backend: str, name: str, corpus: Path, tokens: int) -> Iterator[str]:
    """Of one network. Prompts: short, half a window, and up to where the last token still fits in."""
    text = (NETWORKS / f"{name}.yml").read_text(encoding="utf-8")
    if backend != "cupy":
        text = text.replace("precision: fp16", "precision: float32")
    window = feeds_of(prepare(load_graph(text, NAME), fuse=False)).seq_len
    prompts = sorted({min(8, window - tokens), max(1, (window - tokens) // 2), window - tokens})
    sides = {"bare": bare_rates(load_backend(backend), text, prompts, tokens)}
    for agents in AGENTS:
        sides[f"{agents} agent{'s' * (agents > 1)}"] = asyncio.run(cluster_rates(backend, agents, text, corpus, prompts, tokens))
    for side, rates in sides.items():
        for length in prompts:
            kept, plain = rates[length, True], rates[length, False]
            first = f"{1e3 * kept.first_s:.1f} ms"
            yield f"| {name} | {side} | {length} | {first} | {kept.per_s:,.0f} | {plain.per_s:,.0f} | {kept.per_s / plain.per_s:.1f} |"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["cpu", "cupy"], default="cpu")
    parser.add_argument("--networks", nargs="+", default=["shakespeare_char", "topology_1"], help="files of networks/")
    parser.add_argument("--tokens", type=int, default=64, help="generated behind each prompt")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = [
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; backend {args.backend}, {args.tokens} tokens",
        "",
        "| network | side | prompt | first token | tokens/s with the cache | without | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        corpus = corpus_in(Path(folder))
        for name in args.networks:
            lines += rows(args.backend, name, corpus, args.tokens)
    report = "\n".join(lines) + "\n"
    sys.stdout.write(report)
    if args.out is not None:
        args.out.write_text(report, encoding="utf-8")


if __name__ == "__main__":
    main()
