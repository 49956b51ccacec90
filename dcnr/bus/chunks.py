"""Tensors in chunks over a bus that may lose, repeat and reorder: the two machines at the ends of a flow.

- `Outflow` (one per receiver) says what to send next within a byte window. Transfers leave in order. What was not acknowledged is sent
  again when the receiver says that something is missing, and when there was no progress for as long as `pace.Patience` says; without
  any for too long, the transfers have failed. Nothing else ends them: a slow link that moves is waited for. Only the acknowledgement of
  what was sent once tells how quick the receiver is, and ends the growth of the pauses.
- `Inflow` (one per receiver, for all senders) takes bytes of a transfer in order and drops what leaves a gap, so a chunk may come twice;
  of each gap it tells the sender once. The header and the chunks may come in any order. Until the header is there, the last byte is not
  acknowledged: so it is sent again.
- A peer that is gone takes everything with it that is on its way to it or from it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from dcnr.bus.credit import ACK_EVERY, Key, Seen, key
from dcnr.bus.messages import Chunk, Hop
from dcnr.bus.pace import LONGEST, Patience
from dcnr.errors import InvariantError, PeerError
from dcnr.ids import NetworkId, NodeId, PNodeId

ABANDONED_AFTER = 4 * LONGEST
"""Seconds without a message after which a half-received transfer is let go: its sender is gone."""


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
    reached: int = 0
    """The most that was ever sent: what lies below was sent more than once if it is sent now."""
    taken: int = 0
    missed: int = -1
    """What was taken when the receiver last missed something."""


@dataclass(frozen=True, slots=True)
class _Timed:
    """A chunk whose acknowledgement is measured: it ends at byte `end` of `transfer`."""

    transfer: int
    end: int
    since: float


class Outflow:
    """What is under way to one receiver. `window`, `chunk` in bytes, `patience` in seconds; for `tries` see `pace.Patience`."""

    def __init__(self, window: int, chunk: int, patience: float, tries: int) -> None:
        self.window = window
        self.chunk = chunk
        self._patience = Patience(patience, tries)
        self._transfers: dict[int, _Outgoing] = {}
        self._progress = 0.0
        self._due = 0.0
        self._rounds = 0
        self._timed: _Timed | None = None

    def __len__(self) -> int:
        return len(self._transfers)

    def add(self, transfer: int, nbytes: int, now: float) -> None:
        """Queue a transfer of at least one byte behind the others."""
        if not self._transfers:
            self._moved(now)
        self._transfers[transfer] = _Outgoing(nbytes)

    def next(self, now: float) -> SendHeader | SendChunk | None:
        """What to send now; None while the window is full or nothing is left."""
        for transfer, out in self._transfers.items():
            if not out.announced:
                out.announced = True
                return SendHeader(transfer)
            if out.sent < out.nbytes:
                return self._next_chunk(transfer, out, now)
        return None

    def is_sent(self, transfer: int) -> bool:
        """Whether every byte has left, or the transfer is over."""
        out = self._transfers.get(transfer)
        return out is None or out.sent == out.nbytes

    def credit(self, transfer: int, received: int, now: float) -> bool:
        """The receiver has the bytes below `received`; True when that is all of them."""
        out = self._transfers.get(transfer)
        if out is None or not out.taken <= received <= out.nbytes:
            return False
        if received == out.taken:
            self._missed(transfer, out)
            return False
        if self._timed is not None and self._timed.transfer == transfer and self._timed.end <= received:
            self._patience.note(now - self._timed.since)
            self._timed = None
            self._rounds = 0
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
        self._measure_no_more(transfer)

    def deadline(self) -> float | None:
        """When `tick` has something to do."""
        return self._due if self._transfers else None

    def tick(self, now: float) -> list[int]:
        """Send again what is overdue; returns the transfers that have failed for good."""
        if not self._transfers or now < self._due:
            return []
        self._timed = None
        fails = self._progress + self._patience.limit
        if now >= fails:
            failed = list(self._transfers)
            self._transfers.clear()
            self._rounds = 0
            return failed
        self._rounds += 1
        self._due = min(now + self._patience.pause(self._rounds), fails)
        for out in self._transfers.values():
            out.announced = False
            out.sent = out.taken
        return []

    def validate(self) -> None:
        """Raise `InvariantError` if more is under way than the window allows."""
        for out in self._transfers.values():
            if not 0 <= out.taken <= out.sent <= out.nbytes:
                raise InvariantError(f"outflow: {out}")
        if self._under_way() > max(self.window, self.chunk):
            raise InvariantError(f"outflow: {self._under_way()} bytes under way with a window of {self.window}")

    def _next_chunk(self, transfer: int, out: _Outgoing, now: float) -> SendChunk | None:
        size = min(self.chunk, out.nbytes - out.sent)
        under_way = self._under_way()
        if under_way and under_way + size > self.window:
            return None
        chunk = SendChunk(transfer, out.sent, size)
        if self._timed is None and out.sent >= out.reached:
            self._timed = _Timed(transfer, out.sent + size, now)
        out.sent += size
        out.reached = max(out.reached, out.sent)
        return chunk

    def _under_way(self) -> int:
        return sum(out.sent - out.taken for out in self._transfers.values())

    def _missed(self, transfer: int, out: _Outgoing) -> None:
        """The receiver repeats itself: something behind what it has is lost. Once for each gap; another loss is found by time."""
        if out.missed == out.taken or out.sent == out.taken:
            return
        out.missed = out.sent = out.taken
        out.announced = False
        self._measure_no_more(transfer)

    def _measure_no_more(self, transfer: int) -> None:
        if self._timed is not None and self._timed.transfer == transfer:
            self._timed = None

    def _moved(self, now: float) -> None:
        self._progress = now
        self._due = now + self._patience.pause(self._rounds)


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
    missed: int = -1
    """What was received when the last gap was told of."""


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
            if transfer.missed == transfer.received:
                return effects
            transfer.missed = transfer.received
            return [*effects, self._grant(at, transfer)]
        if end <= transfer.received:
            return [*effects, self._grant(at, transfer)]
        effects.append(Write(at, transfer.received, transfer.received - chunk.offset, transfer.nbytes))
        transfer.received = end
        return [*effects, *self._finish(at, transfer)]

    def forget(self, network: NetworkId, nodes: Container[NodeId]) -> list[Effect]:
        """Let go of half-received hops to these nodes."""

        def concerns(hop: Hop | None) -> bool:
            return hop is not None and hop.network == network and hop.targets[0][0] in nodes

        return self._discard(at for at, transfer in self._transfers.items() if concerns(transfer.hop))

    def release(self, sender: PNodeId, now: float) -> list[Effect]:
        """Let go of what a peer that is gone had begun to send, and of what came too late to be let go so."""
        return [*self._discard(at for at in self._transfers if at[0] == sender), *self._abandon(now)]

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
            transfer.touched = now
            return [], transfer
        if not 0 < nbytes <= self._limit:
            raise PeerError(f"a tensor of {nbytes} bytes; the limit is {self._limit}")
        effects = self._abandon(now)
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

    def _abandon(self, now: float) -> list[Effect]:
        return self._discard(old for old, transfer in self._transfers.items() if transfer.touched + ABANDONED_AFTER < now)

    def _discard(self, transfers: Iterable[Key]) -> list[Effect]:
        gone = list(transfers)
        for at in gone:
            del self._transfers[at]
        return [Discard(at) for at in gone]
