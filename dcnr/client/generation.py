"""Text from a checkpoint, piece by piece as it comes.

Rule 1: an answer that is lost costs nothing: the same is asked again. Whoever finds that the request is not known any more, because another
orchestrator leads, begins it again and goes on where the text was: the same request gives the same text.
Rule 2: silence for `PATIENCE` seconds, or `BEGINNINGS` beginnings without a new piece, are an error. Waiting for PNodes is neither.
Rule 3: a text that nobody reads on is ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypedDict

from dcnr.bus.api import call
from dcnr.bus.base import Bus
from dcnr.client.answers import read
from dcnr.errors import BusUnavailable, DcnrError, NotFound, UserError, WorldError

PATIENCE = 60.0
BEGINNINGS = 3
ASK_EVERY = 0.5
"""Seconds between two questions while nobody answers."""


class GenerateOptions(TypedDict, total=False):
    """How to generate; what is left away is as `dcnr generate` has it."""

    step: int
    """The checkpoint of this step; the newest if not given."""
    temperature: float
    """0 takes the likeliest token always."""
    top_k: int
    """Draw from the likeliest so many; 0 from all."""
    top_p: float
    """Draw from the likeliest whose share reaches it; 1 from all."""
    max_tokens: int
    seed: int
    """The same request with the same seed gives the same text."""
    stop: Sequence[str]
    """Texts that end it; they are not part of it."""
    cache: bool
    """Keep keys and values; without, the window is read anew for every token, with the same text."""
    pnodes: int
    """Spread over so many PNodes; 0 for as few as hold it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What has come since the last question, and where the request stands.

    `after`: where the next question goes on. `tokens` were generated and `positions` read so far. `reason`: why it ended, if it is `done`.
    `waits`: why nothing comes, if so.
    """

    text: str
    after: int
    tokens: int
    positions: int
    done: bool
    failed: bool
    reason: str
    waits: str


@dataclass(frozen=True, slots=True)
class _Begun:
    """A request, and what is read for it."""

    request: str
    session: str
    step: int


async def generate(bus: Bus, wanted: Mapping[str, object]) -> AsyncGenerator[Piece, None]:
    """The pieces of the text that `wanted`, the fields of the verb, asks for. Raises what refuses it, `UserError` if it cannot go on."""
    asked = dict(wanted)
    request: str | None = None
    after = beginnings = 0
    try:
        while True:
            if request is None:
                beginnings += 1
                begun = read(_Begun, await _ask(bus, "generate", asked))
                request = begun.request
                asked |= {"session": begun.session, "step": begun.step}  # a newer checkpoint would go on with another text
            try:
                piece = read(Piece, await _ask(bus, "generate.next", {"request": request, "after": after}))
            except NotFound:
                request = None
                if beginnings >= BEGINNINGS:
                    raise
                continue
            after = piece.after
            if piece.text:
                beginnings = 1
            if piece.done:
                request = None
            yield piece
            if piece.failed:
                raise UserError(f"the text of session {begun.session} could not be gone on with: {piece.reason}")
            if piece.done:
                return
    finally:
        if request is not None:
            with suppress(DcnrError):
                await call(bus, "generate.stop", request=request)


async def _ask(bus: Bus, verb: str, fields: Mapping[str, object]) -> dict[str, Any]:
    """The answer, from whichever orchestrator leads; one that is away is waited for. Raises what it refuses."""
    loop = asyncio.get_running_loop()
    until = loop.time() + PATIENCE
    while True:
        try:
            return await call(bus, verb, **fields)
        except (BusUnavailable, WorldError):
            if loop.time() >= until:
                raise
        await asyncio.sleep(ASK_EVERY)
