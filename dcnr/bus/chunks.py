"""Tensors in chunks over a bus that may lose, repeat and reorder: the two machines at the ends of a flow.

- `Outflow` (one per receiver) says what to send next within a byte window. Transfers leave in order; without progress for `patience`
  seconds everything that was not acknowledged is sent again, and after `tries` such rounds the transfers have failed.
- `Inflow` (one per receiver, for all senders) takes bytes of a transfer in order and drops what leaves a gap, so a chunk may come twice.
  The header and the chunks may come in any order. Until the header is there, the last byte is not acknowledged: so it is sent again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from dcnr.bus.credit import ACK_EVERY, Key, Seen, key
from dcnr.bus.messages import Chunk, Hop
from dcnr.errors import InvariantError, PeerError
from dcnr.ids import NetworkId, NodeId

ABANDONED_AFTER = 60.0
"""Seconds without a byte after which a half-received transfer is let go: its sender is gone."""


@dataclass(frozen=True, slots=True)
class SendHeader:
    """Publish the header of `transfer`."""

    transfer: int


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Publish `size` bytes of `transfer` from `offset`."""

    transfer: int
    offset: int
    size: int


@dataclass(slots=True)
class _Outgoing:
    nbytes: int
    announced: bool = False
    sent: int = 0
    taken: int = 0


class Outflow:
    """What is under way to one receiver. `window`, `chunk` in bytes, `patience` in seconds."""

    def __init__(self, window: int, chunk: int, patience: float, tries: int) -> None:
        self.window = window
        self._chunk = chunk
        self._patience = patience
        self._tries = tries
        self._transfers: dict[int, _Outgoing] = {}
        self._progress = 0.0
        self._rounds = 0

    def __len__(self) -> int:
        return len(self._transfers)

    def add(self, transfer: int, nbytes: int, now: float) -> None:
        """Queue a transfer of at least one byte behind the others."""
        if not self._transfers:
            self._moved(now)
        self._transfers[transfer] = _Outgoing(nbytes)

    def next(self) -> SendHeader | SendChunk | None:
        """What to send now; None while the window is full or nothing is left."""
        for transfer, out in self._transfers.items():
            if not out.announced:
                out.announced = True
                return SendHeader(transfer)
            if out.sent < out.nbytes:
                return self._next_chunk(transfer, out)
        return None

    def is_sent(self, transfer: int) -> bool:
        """Whether every byte has left, or the transfer is over."""
        out = self._transfers.get(transfer)
        return out is None or out.sent == out.nbytes

    def credit(self, transfer: int, received: int, now: float) -> bool:
        """The receiver has the bytes below `received`; True when that is all of them."""
        out = self._transfers.get(transfer)
        if out is None or not out.taken < received <= out.nbytes:
            return False
        self._moved(now)
        out.taken = received
        out.sent = max(out.sent, received)
        if received < out.nbytes:
            return False
        del self._transfers[transfer]
        return True

    def drop(self, transfer: int) -> None:
        """Nobody waits for this transfer any more."""
        self._transfers.pop(transfer, None)

    def deadline(self) -> float | None:
        """When `tick` has something to do."""
        return self._progress + self._patience if self._transfers else None

    def tick(self, now: float) -> list[int]:
        """Send again what is overdue; returns the transfers that have failed for good."""
        due = self.deadline()
        if due is None or now < due:
            return []
        self._rounds += 1
        self._progress = now
        if self._rounds > self._tries:
            failed = list(self._transfers)
            self._transfers.clear()
            return failed
        for out in self._transfers.values():
            out.announced = False
            out.sent = out.taken
        return []

    def validate(self) -> None:
        """Raise `InvariantError` if more is under way than the window allows."""
        for out in self._transfers.values():
            if not 0 <= out.taken <= out.sent <= out.nbytes:
                raise InvariantError(f"outflow: {out}")
        if self._under_way() > max(self.window, self._chunk):
            raise InvariantError(f"outflow: {self._under_way()} bytes under way with a window of {self.window}")

    def _next_chunk(self, transfer: int, out: _Outgoing) -> SendChunk | None:
        size = min(self._chunk, out.nbytes - out.sent)
        under_way = self._under_way()
        if under_way and under_way + size > self.window:
            return None
        chunk = SendChunk(transfer, out.sent, size)
        out.sent += size
        return chunk

    def _under_way(self) -> int:
        return sum(out.sent - out.taken for out in self._transfers.values())

    def _moved(self, now: float) -> None:
        self._progress = now
        self._rounds = 0


@dataclass(frozen=True, slots=True)
class Write:
    """Put the chunk's bytes from its byte `skip` on at `offset` of the buffer of `transfer`, which has `nbytes` bytes."""

    transfer: Key
    offset: int
    skip: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Tell the sender that everything below `received` was taken."""

    transfer: Key
    received: int


@dataclass(frozen=True, slots=True)
class Complete:
    """The buffer of `hop`'s transfer is full: deliver it."""

    hop: Hop


@dataclass(frozen=True, slots=True)
class Discard:
    """Let go of the buffer of `transfer`."""

    transfer: Key


Effect = Write | Grant | Complete | Discard


@dataclass(slots=True)
class _Incoming:
    nbytes: int
    touched: float
    hop: Hop | None = None
    received: int = 0
    granted: int = 0


class Inflow:
    """What is under way to us. `limit`: bytes of the largest tensor. `seen` is shared with the other lanes.

    A sender whose window is at least `ack_every` and a chunk never waits in vain.
    """

    def __init__(self, limit: int, seen: Seen, ack_every: int = ACK_EVERY) -> None:
        self._limit = limit
        self._seen = seen
        self._ack_every = ack_every
        self._transfers: dict[Key, _Incoming] = {}

    def header(self, hop: Hop, now: float) -> list[Effect]:
        """A header came. Raises `PeerError` if it contradicts its chunks."""
        if key(hop) in self._seen:
            return [Grant(key(hop), hop.nbytes)]
        effects, transfer = self._transfer(key(hop), hop.nbytes, now)
        transfer.hop = hop
        return [*effects, *self._finish(key(hop), transfer)]

    def chunk(self, chunk: Chunk, size: int, now: float) -> list[Effect]:
        """`size` bytes of a chunk came. Raises `PeerError` if they do not fit the transfer."""
        at: Key = (chunk.sender, chunk.transfer)
        if at in self._seen:
            return [Grant(at, chunk.nbytes)]
        end = chunk.offset + size
        if size < 1 or chunk.offset < 0 or end > chunk.nbytes:
            raise PeerError(f"chunk of bytes {chunk.offset} to {end} of a transfer of {chunk.nbytes}")
        effects, transfer = self._transfer(at, chunk.nbytes, now)
        if chunk.offset > transfer.received:
            return effects
        if end <= transfer.received:
            return [*effects, self._grant(at, transfer)]
        effects.append(Write(at, transfer.received, transfer.received - chunk.offset, transfer.nbytes))
        transfer.received = end
        transfer.touched = now
        return [*effects, *self._finish(at, transfer)]

    def forget(self, network: NetworkId, nodes: Container[NodeId]) -> list[Effect]:
        """Let go of half-received hops to these nodes."""

        def concerns(hop: Hop | None) -> bool:
            return hop is not None and hop.network == network and hop.targets[0][0] in nodes

        return self._discard(at for at, transfer in self._transfers.items() if concerns(transfer.hop))

    def validate(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        for at, transfer in self._transfers.items():
            complete = transfer.received == transfer.nbytes and transfer.hop is not None
            if not 0 <= transfer.granted <= transfer.received <= transfer.nbytes or complete or at in self._seen:
                raise InvariantError(f"inflow: {transfer}")

    def _transfer(self, at: Key, nbytes: int, now: float) -> tuple[list[Effect], _Incoming]:
        transfer = self._transfers.get(at)
        if transfer is not None:
            if transfer.nbytes != nbytes:
                raise PeerError(f"transfer of {transfer.nbytes} bytes now has {nbytes}")
            return [], transfer
        if not 0 < nbytes <= self._limit:
            raise PeerError(f"a tensor of {nbytes} bytes; the limit is {self._limit}")
        effects = self._discard(old for old, transfer in self._transfers.items() if transfer.touched + ABANDONED_AFTER < now)
        transfer = self._transfers[at] = _Incoming(nbytes, now)
        return effects, transfer

    def _finish(self, at: Key, transfer: _Incoming) -> list[Effect]:
        if transfer.received == transfer.nbytes and transfer.hop is not None:
            del self._transfers[at]
            self._seen.add(at)
            return [Complete(transfer.hop), Grant(at, transfer.nbytes)]
        if transfer.received - transfer.granted >= self._ack_every:
            return [self._grant(at, transfer)]
        return []

    def _grant(self, at: Key, transfer: _Incoming) -> Grant:
        transfer.granted = min(transfer.received, transfer.nbytes - 1)
        return Grant(at, transfer.granted)

    def _discard(self, transfers: Iterable[Key]) -> list[Effect]:
        gone = list(transfers)
        for at in gone:
            del self._transfers[at]
        return [Discard(at) for at in gone]
