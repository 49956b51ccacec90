"""A text that a cluster generates, as it comes: asked for, followed, and stopped when nobody wants it any more.

Rule 1: an answer that does not come is asked for again. An orchestrator that has forgotten the request (it is another one now) is asked for
all of it again: the same request gives the same text, of which what was shown already is left out.
Rule 2: whoever stops listening stops the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dcnr.bus.api import call
from dcnr.bus.base import Bus
from dcnr.errors import BusUnavailable, DcnrError, NotFound, UserError, WorldError

RETRY_AFTER = 0.5
"""Seconds until an orchestrator that does not answer is asked again."""
PATIENCE = 60.0
"""Seconds without one, after which it is given up."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What came last, and where the request stands. `waits`: why nothing comes, if so."""

    text: str
    tokens: int
    positions: int
    done: bool
    reason: str
    waits: str


async def generate(bus: Bus, wanted: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
    """The pieces of one text. `wanted`: the fields of the verb. Raises what refuses it, and `UserError` for what ends it early."""
    begun = await call(bus, "generate", **wanted)
    request, after = begun["request"], 0
    again = {**wanted, "session": begun["session"], "step": begun["step"]}
    try:
        while True:
            try:
                told = await _patiently(bus, "generate.next", request=request, after=after)
            except NotFound:
                request = (await _patiently(bus, "generate", **again))["request"]
                continue
            after = told["after"]
            if told["failed"]:
                raise UserError(told["reason"])
            yield Piece(*(told[name] for name in ("text", "tokens", "positions", "done", "reason", "waits")))
            if told["done"]:
                request = None
                return
    finally:
        if request is not None:
            with suppress(DcnrError):
                await call(bus, "generate.stop", request=request)


async def _patiently(bus: Bus, verb: str, **fields: Any) -> dict[str, Any]:
    """An answer, although the orchestrator may change."""
    loop = asyncio.get_running_loop()
    until = loop.time() + PATIENCE
    while True:
        try:
            return await call(bus, verb, **fields)
        except (BusUnavailable, WorldError):
            if loop.time() >= until:
                raise
            await asyncio.sleep(RETRY_AFTER)
