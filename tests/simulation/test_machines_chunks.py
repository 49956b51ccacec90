"""Chunks and credits under any order, loss and repetition: bytes arrive in full, and once."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dcnr.bus.chunks import Complete, Discard, Effect, Grant, Inflow, Outflow, SendChunk, SendHeader, Write
from dcnr.bus.credit import Seen
from dcnr.bus.messages import Chunk, Hop
from dcnr.ids import Epoch, NetworkId, NodeId, PNodeId, SessionId

ME, WINDOW, CHUNK, PATIENCE, ACK_EVERY = PNodeId("a"), 64, 16, 2.0, 32
Wire = Hop | tuple[Chunk, bytes] | Grant
PICK = st.integers(0, 1 << 16)


def content(transfer: int, nbytes: int) -> bytes:
    """What a transfer carries."""
    return bytes((transfer * 31 + at) % 251 for at in range(nbytes))


def header(transfer: int, nbytes: int) -> Hop:
    """The header of a transfer."""
    return Hop(
        NetworkId("net"), SessionId("run"), Epoch(1), 1, 0, 0, "fwd", NodeId("x"), 0, ((NodeId("y"), 0),), ME, "uint8", (nbytes,),
        lane="chunks", transfer=transfer, nbytes=nbytes,
    )  # fmt: skip


class Flow(RuleBasedStateMachine):
    """A sender, a receiver, and a wire that may do anything to what is on it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.out = Outflow(WINDOW, CHUNK, PATIENCE, tries=1 << 30)
        self.into = Inflow(1 << 10, Seen(), ACK_EVERY)
        self.sizes: dict[int, int] = {}
        self.buffers: dict[tuple[PNodeId, int], bytearray] = {}
        self.delivered: dict[int, bytes] = {}
        self.acknowledged: set[int] = set()
        self.wire: list[Wire] = []

    @precondition(lambda self: len(self.sizes) < 6)
    @rule(nbytes=st.integers(1, 100))
    def send(self, nbytes: int) -> None:
        """Another tensor is to go out."""
        transfer = len(self.sizes)
        self.sizes[transfer] = nbytes
        self.out.add(transfer, nbytes, self.now)

    @rule(most=st.integers(1, 10))
    def pump(self, most: int) -> None:
        """The sender puts on the wire what the window allows."""
        for _ in range(most):
            match self.out.next(self.now):
                case SendHeader(transfer):
                    self.wire.append(header(transfer, self.sizes[transfer]))
                case SendChunk(transfer, offset, size):
                    nbytes = self.sizes[transfer]
                    self.wire.append((Chunk(ME, transfer, offset, nbytes), content(transfer, nbytes)[offset : offset + size]))
                case None:
                    return

    @precondition(lambda self: self.wire)
    @rule(which=PICK, keep=st.booleans())
    def arrive(self, which: int, keep: bool) -> None:
        """Something arrives, whatever is before it; it may come once more."""
        at = which % len(self.wire)
        thing = self.wire[at] if keep else self.wire.pop(at)
        self.take(thing)

    @precondition(lambda self: self.wire)
    @rule(which=PICK)
    def lose(self, which: int) -> None:
        """Something is lost."""
        del self.wire[which % len(self.wire)]

    @rule(seconds=st.sampled_from((0.5, PATIENCE)))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        assert self.out.tick(self.now) == []

    def take(self, thing: Wire) -> None:
        """At the end that it is for."""
        match thing:
            case Hop():
                self.follow(self.into.header(thing, self.now))
            case Grant((_, transfer), received):
                if self.out.credit(transfer, received, self.now):
                    assert transfer in self.delivered, "acknowledged before it was there"
                    self.acknowledged.add(transfer)
            case (chunk, data):
                self.follow(self.into.chunk(chunk, len(data), self.now), data)

    def follow(self, effects: list[Effect], data: bytes = b"") -> None:
        """What the receiver does."""
        for effect in effects:
            match effect:
                case Write(transfer, offset, skip, nbytes):
                    buffer = self.buffers.setdefault(transfer, bytearray(nbytes))
                    buffer[offset : offset + len(data) - skip] = data[skip:]
                case Grant():
                    self.wire.append(effect)
                case Complete(hop):
                    assert hop.transfer not in self.delivered, "delivered twice"
                    self.delivered[hop.transfer] = bytes(self.buffers.pop((ME, hop.transfer)))
                case Discard(transfer):
                    self.buffers.pop(transfer, None)

    @invariant()
    def holds(self) -> None:
        """Neither end contradicts itself, and whatever was delivered is what was sent."""
        self.out.validate()
        self.into.validate()
        for transfer, data in self.delivered.items():
            assert data == content(transfer, self.sizes[transfer])

    def teardown(self) -> None:
        """On a wire that loses nothing any more everything arrives, and the sender knows it."""
        for _ in range(100):
            if len(self.out) == 0:
                break
            self.wait(max(PATIENCE, (self.out.deadline() or 0.0) - self.now))
            self.pump(1 << 10)
            while self.wire:
                self.take(self.wire.pop(0))
                self.pump(1 << 10)
        self.holds()
        assert self.delivered.keys() == self.sizes.keys() == self.acknowledged


TestFlow = Flow.TestCase
TestFlow.settings = settings(max_examples=30, stateful_step_count=50, derandomize=True, deadline=None)
