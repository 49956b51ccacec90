"""One connection: who is let in, what a frame may be, and that whoever waits learns when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from dcnr.bus.lanes import link as link_module
from dcnr.bus.lanes.base import LaneBroken
from dcnr.bus.lanes.handshake import NONCE, TOKEN, Caller, Listener
from dcnr.bus.lanes.link import _HEAD, PIECE, Link
from dcnr.errors import PeerError
from dcnr.ids import PNodeId
from tests.bus.contract import until

A, B = PNodeId("a"), PNodeId("b")
KEY = bytes(range(TOKEN))


@dataclass
class Box:
    """An inbox that keeps what comes."""

    data: dict[int, bytearray] = field(default_factory=dict)
    told: list[object] = field(default_factory=list)
    unwanted: set[int] = field(default_factory=set)

    def established(self, link: Link) -> None:
        """Note it."""
        self.told.append(("established", link.peer))

    def place(self, link: Link, number: int, offset: int, size: int, nbytes: int) -> memoryview | None:
        """Room as announced."""
        if number in self.unwanted:
            return None
        return memoryview(self.data.setdefault(number, bytearray(nbytes)))[offset : offset + size]

    def placed(self, link: Link, number: int, offset: int, size: int) -> None:
        """Note it."""
        self.told.append((number, offset, size))

    def cancelled(self, link: Link, number: int) -> None:
        """Note it."""
        self.told.append(("cancelled", number))

    def lost(self, link: Link, error: PeerError | None) -> None:
        """Note it."""
        self.told.append(("lost", str(error) if error else ""))


@asynccontextmanager
async def linked(caller_key: bytes = KEY) -> AsyncIterator[tuple[Link, Link, Box, Box]]:
    """Both ends of a connection, and their inboxes."""
    loop = asyncio.get_running_loop()
    ours, theirs = Box(), Box()
    caller = Link(Caller(A, B, caller_key, b"1" * NONCE), ours, 5)
    listener = Link(Listener(B, {A: KEY}.get, b"2" * NONCE), theirs, 5)
    server = await loop.create_server(lambda: listener, "127.0.0.1", 0)
    await loop.create_connection(lambda: caller, *server.sockets[0].getsockname())
    try:
        yield caller, listener, ours, theirs
    finally:
        for link in (caller, listener):
            link.abort()
            await link.ended
        server.close()


async def test_bytes_land_in_their_place_piece_by_piece() -> None:
    """Of several transfers at once, in both directions; what nobody wants is read and forgotten."""
    async with linked() as (caller, listener, ours, theirs):
        await asyncio.gather(caller.ready, listener.ready)
        theirs.unwanted = {3}
        large, small = bytes(range(256)) * (PIECE // 128), b"small"
        await asyncio.gather(
            caller.send(1, memoryview(large)),
            caller.send(2, memoryview(small)),
            caller.send(3, memoryview(small)),
            listener.send(9, memoryview(small)),
        )
        await until(lambda: len(theirs.told) == 5 and len(ours.told) == 2)
        assert (bytes(theirs.data[1]), bytes(theirs.data[2]), bytes(ours.data[9])) == (large, small, small)
        assert [told for told in theirs.told if isinstance(told, tuple) and told[0] == 1] == [(1, 0, PIECE), (1, PIECE, PIECE)]


async def test_the_speed_is_measured_once() -> None:
    """In each direction by itself."""
    async with linked() as (caller, listener, _ours, theirs):
        await asyncio.gather(caller.ready, listener.ready)
        rate = await caller.measure()
        assert rate > 0
        assert await caller.measure() == rate
        assert listener.rate == 0
        assert theirs.told == [("established", A)]


async def test_without_the_token_neither_side_is_ready() -> None:
    """The caller notices first; the listener just loses a caller."""
    async with linked(bytes(TOKEN)) as (caller, listener, ours, theirs):
        with pytest.raises(LaneBroken, match="does not know the token"):
            await caller.ready
        with pytest.raises(LaneBroken):
            await listener.ready
        assert not caller.is_open
        assert [told[0] for told in (*ours.told, *theirs.told) if isinstance(told, tuple)] == ["lost", "lost"]


async def test_who_does_not_finish_the_handshake_is_shown_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence costs a connection and nothing else."""
    monkeypatch.setattr(link_module, "HANDSHAKE_SECONDS", 0.01)
    box = Box()
    listener = Link(Listener(B, {A: KEY}.get, b"2" * NONCE), box, 5)
    server = await asyncio.get_running_loop().create_server(lambda: listener, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    await listener.ended
    assert box.told == [("lost", "handshake: not over after 0.01 s")]
    writer.close()
    server.close()


@pytest.mark.parametrize("frame", [(0, 0), (9, 5), (1, 0), (1, PIECE + 1), (3, PIECE + 1), (4, 0)])
async def test_frames_that_cannot_be_end_the_connection(frame: tuple[int, int]) -> None:
    """Unknown kinds, sizes out of range, an answer that nobody asked for."""
    async with linked() as (caller, listener, _ours, theirs):
        await asyncio.gather(caller.ready, listener.ready)
        assert caller._transport is not None
        caller._transport.write(_HEAD.pack(*frame, 1, 0, 2 * PIECE))
        await listener.ended
        await caller.ended
        assert str(theirs.told[-1]).startswith("('lost', 'frame: kind")
        with pytest.raises(LaneBroken, match="the connection to b broke"):
            await caller.send(1, memoryview(b"x"))
        caller.cancel(1)


async def test_whoever_waits_for_room_learns_that_the_connection_ended() -> None:
    """And whoever waits for the measurement."""
    async with linked() as (caller, listener, _ours, _theirs):
        await asyncio.gather(caller.ready, listener.ready)
        assert listener._transport is not None
        listener._transport.pause_reading()
        tasks = [asyncio.create_task(caller.send(1, memoryview(bytes(64 << 20)))), asyncio.create_task(caller.measure())]
        await until(lambda: not caller._room.is_set())
        listener.abort()
        assert all(isinstance(result, LaneBroken) for result in await asyncio.gather(*tasks, return_exceptions=True))
