"""Headers of tensors that lie in memory which the receiver is to read: published until there is a credit, or no hope of one.

The memory must be looked after even if the sender gives up, or the process ends while a header is on its way: so each header has a task of
its own, and what is done at its end is done by a callback, which also runs if the task never began.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from dcnr.bus.lanes.base import REFUSED, LaneBroken, Port, gone, resolve, silent
from dcnr.bus.messages import Credit, Hop
from dcnr.bus.pace import Patience
from dcnr.errors import WorldError
from dcnr.ids import PNodeId

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(slots=True)
class _Announced:
    to: PNodeId
    refusal: Callable[[], LaneBroken]
    credited: asyncio.Event = field(default_factory=asyncio.Event)
    refused: bool = False
    released: bool = False


class Announcements:
    """All headers of one lane that are not settled."""

    def __init__(self, port: Port, patience: float) -> None:
        self._port = port
        self._first = patience
        self._patience: dict[PNodeId, Patience] = {}
        self._announced: dict[int, _Announced] = {}

    async def send(self, to: PNodeId, hop: Hop, settle: Callable[[bool], None], refusal: Callable[[], LaneBroken]) -> asyncio.Future[None]:
        """Publish `hop`; returns when that was done once. The future is done when the receiver has the tensor.

        `settle` is called at the end: True if the receiver has taken it, False if nobody knows. `refusal` says what it means that the
        receiver cannot read our memory.
        """
        loop = asyncio.get_running_loop()
        published: asyncio.Future[None] = loop.create_future()
        arrived: asyncio.Future[None] = loop.create_future()
        announced = self._announced[hop.transfer] = _Announced(to, refusal)

        def over(task: asyncio.Task[Exception | None]) -> None:
            given_up = WorldError(f"a tensor on its way to {to} was given up")
            outcome = given_up if task.cancelled() else task.result()
            del self._announced[hop.transfer]
            settle(outcome is None)
            resolve(published)
            resolve(arrived, outcome)

        self._port.start(self._see_through(hop, announced, published)).add_done_callback(over)
        await published
        return arrived

    def credit(self, credit: Credit) -> None:
        """A receiver speaks of a transfer, perhaps of another lane."""
        announced = self._announced.get(credit.transfer)
        if announced is not None and announced.to == credit.receiver:
            announced.refused = credit.received == REFUSED
            announced.credited.set()

    def release(self, peer: PNodeId) -> None:
        """A peer is gone: nothing more is to be expected of it."""
        self._patience.pop(peer, None)
        for announced in self._announced.values():
            if announced.to == peer:
                announced.released = True
                announced.credited.set()

    async def _see_through(self, hop: Hop, announced: _Announced, published: asyncio.Future[None]) -> Exception | None:
        """Returns what went wrong."""
        time, again = asyncio.get_running_loop().time, 0
        patience, began = self._patience.setdefault(announced.to, Patience(self._first)), time()
        while time() < began + patience.limit:
            try:
                await self._port.publish(hop)
            except WorldError as error:  # no connection; the next round tries again
                _log.debug("header not sent", to=announced.to, error=str(error))
            resolve(published)
            try:
                async with asyncio.timeout(patience.pause(again)):
                    await announced.credited.wait()
            except TimeoutError:
                again += 1
                continue
            if announced.released:
                return gone(announced.to)
            if not again:
                patience.note(time() - began)
            return announced.refusal() if announced.refused else None
        return silent(announced.to)
