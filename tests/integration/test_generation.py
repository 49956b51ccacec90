"""Text through the API and real agents on one memory bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dcnr.agents.shell import Shell
from dcnr.backends.base import Array, Rope
from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.bus.memory import MemoryBroker
from dcnr.ids import PNodeId, SessionId
from dcnr.network.load import load_graph
from dcnr.storage.checkpoint import MOMENTS, read_manifest, read_tensors
from dcnr.storage.file import FileStorage
from tests.agents.tiny import SEQ, TINY
from tests.integration.scripted import agents, info_of
from tests.orchestrator.running import User, make_data, orchestrator, user
from tests.parity.sampler import Sampler

RUN: dict[str, Any] = {"network": "tiny", "dataset": "text", "steps": 30, "batch": 6, "seed": 3, "session": "s"}
HYPER = {"lr": 0.02, "checkpoint_every": 10, "keep_last": 9}
TOKENS = 12


class Counting(NumpyBackend):
    """Notes how many positions attention gets at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: list[int] = []
        self.plain: list[int] = []

    def attention_cached(self, qkv_BTF: Array, bias_F: Array | None, heads: int, rope: Rope | None, into_BSE: Array, first: int) -> Array:
        """Counted."""
        self.cached.append(qkv_BTF.shape[1])
        return super().attention_cached(qkv_BTF, bias_F, heads, rope, into_BSE, first)

    def attention(
        self, qkv_BTF: Array, bias_F: Array | None, heads: int, causal: bool, rope: Rope | None
    ) -> tuple[Array, tuple[Array, ...]]:
        """Counted."""
        self.plain.append(qkv_BTF.shape[1])
        return super().attention(qkv_BTF, bias_F, heads, causal, rope)


@asynccontextmanager
async def cluster(data_dir: Path, backend: NumpyBackend) -> AsyncIterator[tuple[User, dict[PNodeId, Shell]]]:
    """Three agents, and session `s`, trained."""
    make_data(data_dir)
    broker = MemoryBroker()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(orchestrator(broker, data_dir))
        shells = await stack.enter_async_context(agents(broker, backend, [info_of(name) for name in "abc"]))
        one = await stack.enter_async_context(user(broker))
        await one.ask("session.create", file=TINY, hyper=HYPER, **RUN)
        await one.until_state("done")
        yield one, shells


async def text(one: User, **fields: Any) -> dict[str, Any]:
    """The last answer, with the whole text in it."""
    begun = await one.ask("generate", **{"session": "s", "prompt": "ab", "temperature": 0, "max_tokens": TOKENS, **fields})
    whole, after = "", 0
    async with asyncio.timeout(30):
        while True:
            told = await one.ask("generate.next", request=begun["request"], after=after)
            whole, after = whole + told["text"], told["after"]
            if told["done"]:
                return {**told, "text": whole}


async def reference(data_dir: Path, step: int) -> str:
    """The same text by the unfused training graph, node by node, in this process."""
    storage = FileStorage(data_dir)
    manifest = await read_manifest(storage, SessionId("s"), step)
    saved = await read_tensors(storage, manifest, [name for name in manifest.tensors if not name.endswith(MOMENTS)])
    plain, ids = Sampler(load_graph(TINY, "tiny.yml"), saved, NumpyBackend()), [1, 2]
    for _ in range(TOKENS):
        ids.append(int(np.argmax(plain.logits(ids)[:5])))
    return "".join(" abcd"[token] for token in ids[2:])


async def test_one_text_whatever_the_placement_the_cache_and_who_asks(tmp_path: Path) -> None:
    """On 1 and 3 PNodes, with a cache and without, alone and among others: that of the plain graph."""
    async with cluster(tmp_path, NumpyBackend()) as (one, _):
        for step in (10, 30):
            wanted = await reference(tmp_path, step)
            for pnodes in (1, 3):
                for cache in (True, False):
                    told = await text(one, pnodes=pnodes, cache=cache, step=step)
                    assert told["text"] == wanted, (pnodes, cache, step)
        many = await asyncio.gather(*(text(one) for _ in range(6)))
        assert {told["text"] for told in many} == {await reference(tmp_path, 30)}


async def test_a_token_costs_one_position(tmp_path: Path) -> None:
    """In every attention: two for the prompt, then one by one; without a cache all of them each time."""
    backend = Counting()
    async with cluster(tmp_path, backend) as (one, _):
        backend.plain.clear()
        told = await text(one, max_tokens=SEQ - 1)
        assert backend.cached == [2] + [1] * (SEQ - 2)
        assert backend.plain == []
        assert told["positions"] == 2 + (SEQ - 2)
        backend.cached.clear()
        await text(one, max_tokens=SEQ - 1, cache=False)
        assert backend.cached == []
        assert backend.plain == [2, 3, 4, 5]


async def test_an_agent_that_leaves_in_the_middle_changes_no_text(tmp_path: Path) -> None:
    """What it had kept is read anew elsewhere."""
    async with cluster(tmp_path, NumpyBackend()) as (one, shells):
        wanted = await text(one, max_tokens=150, temperature=1.0, seed=4)
        begun = await one.ask("generate", session="s", prompt="ab", temperature=1.0, seed=4, max_tokens=150)
        (host,) = [name for name, shell in shells.items() if shell.machine.sessions]
        first = await one.ask("generate.next", request=begun["request"])
        shells[host].stop()
        found, after = first["text"], first["after"]
        async with asyncio.timeout(40):
            while not first["done"]:
                first = await one.ask("generate.next", request=begun["request"], after=after)
                found, after = found + first["text"], first["after"]
        assert found == wanted["text"]
        assert first["positions"] > wanted["positions"]


async def test_a_stop_text_ends_it_and_the_seed_decides(tmp_path: Path) -> None:
    """The stop text is not part of it; another seed is another text; with one token to choose from it is as cold."""
    async with cluster(tmp_path, NumpyBackend()) as (one, _):
        warm: dict[str, Any] = {"temperature": 1.5, "seed": 11, "max_tokens": 20}
        whole = await text(one, **warm)
        for stop in ("d", "ab", "zz"):
            told = await text(one, **warm, stop=[stop])
            assert told["text"] == whole["text"].partition(stop)[0]
            assert told["reason"] == ("stop" if stop in whole["text"] else "length")
        assert (await text(one, **{**warm, "seed": 12}))["text"] != whole["text"]
        assert (await text(one, **warm, top_k=1))["text"] == (await text(one, max_tokens=20))["text"]
