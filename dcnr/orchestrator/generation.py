"""The verbs of text: a request is checked and begun here, and told of piece by piece to whoever asks.

Rule 1: what is read is a complete checkpoint: the newest of a session, or that of a step. What it says counts, not what the session became.
Rule 2: `next` waits a little for news; its answer says where the next question goes on (`after`), so an answer that is lost costs nothing.
Rule 3: the same request gives the same text: who lost this orchestrator asks the next one for all of it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from dcnr.errors import NotFound, UserError
from dcnr.ids import SessionId, check_id
from dcnr.network.load import load_graph
from dcnr.orchestrator import events
from dcnr.orchestrator.cluster import Cluster
from dcnr.orchestrator.feed import feeds_of
from dcnr.orchestrator.reading import Reading, Request
from dcnr.orchestrator.requests import Generate, NextText, StopText
from dcnr.orchestrator.sampling import Sampling
from dcnr.orchestrator.source import Source
from dcnr.passes import prepare
from dcnr.storage.base import Storage
from dcnr.storage.checkpoint import Manifest, checkpoint_prefix, read_manifest
from dcnr.storage.export import tokenizer_of
from dcnr.text.answer import said
from dcnr.text.tokenizer import Tokenizer

WAIT = 2.0
"""Seconds that `next` waits for news."""

Answer = dict[str, Any]
Ask = Callable[[Callable[[int], events.Ask]], Any]


class News:
    """Wakes all who wait."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        """Something happened."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Until something happens, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()


class Tongue:
    """How the ids of a request become text, and what ends it: a stop text, or the end of a document if the tokenizer has a token for it."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._end = tokenizer.end_id

    def ended(self, tokens: Sequence[int]) -> bool:
        """Whether one is there; a stop text can only be at the end, in no more tokens than it has bytes."""
        if self._has_ended(tokens):
            return True
        longest = max((len(stop.encode()) for stop in self._stops), default=0)
        tail = self._tokenizer.decode(tokens[-longest - 4 :]) if longest else ""
        return any(stop in tail for stop in self._stops)

    def said(self, tokens: Sequence[int], done: bool) -> str:
        """What may be shown of what was generated."""
        return said(self._tokenizer.decode(tokens[:-1] if self._has_ended(tokens) else tokens), self._stops, done)

    def _has_ended(self, tokens: Sequence[int]) -> bool:
        return bool(tokens) and tokens[-1] == self._end


class Generation:
    """The verbs, over the machine of the leader. `tell` gives the machine an event that has no answer."""

    def __init__(self, cluster: Cluster, ask: Ask, tell: Callable[[events.Event], None], storage: Storage, data_dir: Path) -> None:
        self.news = News()
        self._cluster = cluster
        self._ask = ask
        self._tell = tell
        self._storage = storage
        self._data_dir = data_dir

    async def start(self, request: Generate) -> Answer:
        """Begin a text."""
        manifest = await self._manifest(SessionId(check_id(request.session, "session")), request.step)
        tokenizer = await tokenizer_of(self._storage, self._data_dir, manifest)
        source = await asyncio.to_thread(source_of, manifest, request.pnodes)
        prompt = await asyncio.to_thread(_prompt, source, tokenizer, request.prompt)
        name, tongue = token_hex(8), Tongue(tokenizer, request.stop)
        sampling = Sampling(request.temperature, request.top_k, request.top_p, request.seed, tokenizer.vocab_size)
        about = name, source, prompt, sampling, request.max_tokens, request.cache, tongue.ended, tongue.said
        await self._ask(lambda number: events.Generate(number, *about))
        return {"request": name, "session": manifest.session, "step": manifest.step}

    async def next(self, request: NextText) -> Answer:
        """What has come since."""
        loop = asyncio.get_running_loop()
        until = loop.time() + WAIT
        self._tell(events.AskedFor(request.request))
        while True:
            reading, one = self._find(request.request)
            one = replace(one, ids=list(one.ids))  # the machine goes on meanwhile
            text = await asyncio.to_thread(one.ask.said, one.tokens, bool(one.done))
            left = until - loop.time()
            if len(text) > request.after or one.done or left <= 0:
                return _told(reading, one, text, request.after)
            await self.news.wait(left)

    async def stop(self, request: StopText) -> Answer:
        """End it where it is."""
        self._find(request.request)
        await self._ask(lambda number: events.StopGenerating(number, request.request))
        return {"request": request.request}

    def _find(self, name: str) -> tuple[Reading, Request]:
        found = self._cluster.readings.find(name)
        if found is None:
            raise NotFound(f"no request '{name}'", "it is forgotten a minute after it was last asked about; begin it again")
        return found

    async def _manifest(self, session: SessionId, step: int | None) -> Manifest:
        if session not in self._cluster.sessions and not await self._storage.list(checkpoint_prefix(session)):
            raise NotFound(f"no session '{session}'", "see `dcnr session list` and `dcnr checkpoint list`")
        return await read_manifest(self._storage, session, step)


def _told(reading: Reading, one: Request, text: str, after: int) -> Answer:
    return {
        "text": text[after:],
        "after": max(after, len(text)),
        "tokens": len(one.tokens),
        "positions": one.positions,
        "done": bool(one.done),
        "failed": one.failed,
        "reason": one.done,
        "waits": "" if one.done else reading.reason or ("waits for its turn" if one.slot is None else ""),
    }


def source_of(manifest: Manifest, pnodes: int) -> Source:
    """What is read of a checkpoint. Blocks; raises `UserError` if it cannot generate."""
    graph = prepare(load_graph(manifest.network_file, f"{manifest.network}.yml"), manifest.fuse, "generate")
    weights = " ".join(sorted(part.sha256 for part in manifest.parts))
    return Source(manifest.session, manifest.step, manifest.key, weights, manifest.network_file, manifest.fuse, graph, pnodes)


def _prompt(source: Source, tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Its ids. Raises `UserError` for what the tokenizer or the network does not know."""
    if not text:
        raise UserError("the prompt is empty, so there is nothing to go on from", "give at least one character; a line break will do")
    ids = tokenizer.encode(text)
    for node_id, _slot in feeds_of(source.graph).ids:
        known = getattr(source.graph.by_id[node_id].config, "vocab_size", None)
        if known is not None and max(ids) >= known:
            raise UserError(
                f"id {max(ids)} of the prompt is not in the vocabulary of node '{node_id}' ({known})",
                "the tokenizer is not the one that the network was trained with",
            )
    return tuple(ids)
