"""The smallest tensors: the bytes follow the header in the same message. Not acknowledged, so lost with it."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import numpy as np

from dcnr.bus.lanes.base import HEADER_ROOM, Bytes, Port
from dcnr.bus.messages import Credit, Hop
from dcnr.errors import PeerError
from dcnr.ids import PNodeId

INLINE_LIMIT = 512 << 10
"""Larger ones need flow control, whatever the server would take."""


class InlineLane:
    """Header and bytes in one message."""

    name: ClassVar[str] = "inline"

    def __init__(self, port: Port) -> None:
        self._port = port

    async def start(self) -> None:
        """Nothing to prepare."""

    def serves(self, to: PNodeId, nbytes: int) -> bool:
        """Whatever fits one message."""
        return nbytes <= min(INLINE_LIMIT, self._port.bus.max_payload - HEADER_ROOM)

    async def send(self, to: PNodeId, hop: Hop, data: Bytes) -> asyncio.Future[None]:
        """Publish; done at once."""
        await self._port.publish(hop, data.data)
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        arrived.set_result(None)
        return arrived

    def on_header(self, hop: Hop, payload: memoryview) -> None:
        """Deliver a view of the message, which is read-only."""
        if len(payload) != hop.nbytes:
            raise PeerError(f"hop: {len(payload)} bytes follow a header of {hop.nbytes}")
        if self._port.seen.add((hop.sender, hop.transfer)):
            self._port.deliver(hop, np.frombuffer(payload, np.uint8))

    def on_credit(self, credit: Credit) -> None:
        """Nothing waits for one."""

    def release(self, peer: PNodeId) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing to let go of."""
