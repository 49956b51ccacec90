"""Chunks arrive complete, once and in time, whatever the bus loses, repeats or reorders."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcnr.bus.chunks import ABANDONED_AFTER, Complete, Discard, Effect, Grant, Inflow, Outflow, SendChunk, SendHeader, Write
from dcnr.bus.credit import Key, Seen
from dcnr.bus.messages import Chunk, Hop
from dcnr.errors import PeerError
from dcnr.ids import Epoch, NetworkId, NodeId, PNodeId, SessionId

SENDER = PNodeId("s")
NET = NetworkId("n")
LIMIT = 1 << 30
MIB = 1 << 20


def hop(transfer: int, nbytes: int) -> Hop:
    """A header of `nbytes` bytes."""
    header = Hop(NET, SessionId("s"), Epoch(1), 1, 0, 0, "fwd", NodeId("a"), 0, ((NodeId("b"), 0),), SENDER, "uint8", (nbytes,))
    return replace(header, nbytes=nbytes, transfer=transfer)


class Wire:
    """Both machines and a bus between them that does what `rng` says, with real bytes."""

    def __init__(self, rng: random.Random, sizes: list[int], ack_every: int, window: int, chunk: int) -> None:
        self.rng = rng
        self.data = {number: rng.randbytes(size) for number, size in enumerate(sizes, 1)}
        self.out = Outflow(window, chunk, patience=1.0, tries=1 << 40)
        self.inflow = Inflow(LIMIT, Seen(), ack_every)
        self.buffers: dict[Key, bytearray] = {}
        self.delivered: list[tuple[int, bytes]] = []
        self.arrived: list[int] = []
        self.forth: list[SendHeader | SendChunk] = []
        self.back: list[Grant] = []
        self.now = 0.0

    def validate(self) -> None:
        self.out.validate()
        self.inflow.validate()

    def perform(self, effects: list[Effect], payload: bytes) -> None:
        for effect in effects:
            match effect:
                case Write(transfer, offset, skip, nbytes):
                    part = payload[skip:]
                    self.buffers.setdefault(transfer, bytearray(nbytes))[offset : offset + len(part)] = part
                case Grant():
                    self.back.append(effect)
                case Complete(header):
                    self.delivered.append((header.transfer, bytes(self.buffers.pop((header.sender, header.transfer)))))
                case Discard(transfer):
                    self.buffers.pop(transfer, None)

    def receive(self, message: SendHeader | SendChunk) -> None:
        data = self.data[message.transfer]
        if isinstance(message, SendHeader):
            self.perform(self.inflow.header(hop(message.transfer, len(data)), self.now), b"")
        else:
            part = data[message.offset : message.offset + message.size]
            self.perform(self.inflow.chunk(Chunk(SENDER, message.transfer, message.offset, len(data)), len(part), self.now), part)

    def run(self, loss: float, repeat: float, shuffle: bool) -> None:
        for number, data in self.data.items():
            self.out.add(number, len(data), self.now)
        for _ in range(20_000):
            if not len(self.out):
                return
            self.step(loss, repeat, shuffle)
            self.validate()
        raise AssertionError("no end")

    def step(self, loss: float, repeat: float, shuffle: bool) -> None:
        while (message := self.out.next(self.now)) is not None:
            self.forth += [message] * (0 if self.rng.random() < loss else 2 if self.rng.random() < repeat else 1)
        if not self.forth and not self.back:
            self.now = max(self.now + 1.0, self.out.deadline() or 0.0)
            assert self.out.tick(self.now) == []
            return
        queue = self.forth if self.forth and (not self.back or self.rng.random() < 0.5) else self.back
        message_or_grant = queue.pop(self.rng.randrange(len(queue)) if shuffle else 0)
        if isinstance(message_or_grant, Grant):
            if self.rng.random() >= loss and self.out.credit(message_or_grant.transfer[1], message_or_grant.received, self.now):
                self.arrived.append(message_or_grant.transfer[1])
        else:
            self.receive(message_or_grant)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=5),
    ack_every=st.integers(1, 2000),
    spare=st.integers(0, 2000),
    chunk=st.integers(1, 1500),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    repeat=st.sampled_from([0.0, 0.3]),
    shuffle=st.booleans(),
)
def test_every_transfer_is_delivered_once_with_its_bytes(
    seed: int, sizes: list[int], ack_every: int, spare: int, chunk: int, loss: float, repeat: float, shuffle: bool
) -> None:
    """Also when messages and credits are dropped, doubled and shuffled; and the sender learns of it."""
    chunk = max(chunk, max(sizes) // 50 + 1)
    wire = Wire(random.Random(seed), sizes, ack_every, ack_every + chunk + spare, chunk)
    wire.run(loss, repeat, shuffle)
    assert sorted(wire.delivered) == sorted(wire.data.items())
    assert sorted(wire.arrived) == sorted(wire.data)
    if not loss and not shuffle:
        assert wire.now == 0.0, "nothing was lost, so nothing may wait for a time-out"


def sends(out: Outflow, now: float = 0.0) -> Iterator[SendHeader | SendChunk]:
    """What leaves without another event."""
    while (message := out.next(now)) is not None:
        yield message


def test_transfers_leave_in_order_within_the_window() -> None:
    """1. header and chunks of the first; 2. nothing more while the window is full; 3. a credit makes room; 4. the second follows."""
    out = Outflow(window=2 * MIB, chunk=MIB, patience=1, tries=1)
    out.add(1, 3 * MIB, 0)
    out.add(2, MIB // 2, 0)
    assert list(sends(out)) == [SendHeader(1), SendChunk(1, 0, MIB), SendChunk(1, MIB, MIB)]
    assert not out.is_sent(1)
    assert out.credit(1, MIB, 0.5) is False
    assert list(sends(out)) == [SendChunk(1, 2 * MIB, MIB), SendHeader(2)]
    assert out.is_sent(1)
    assert out.credit(1, 3 * MIB, 0.6) is True
    assert list(sends(out)) == [SendChunk(2, 0, MIB // 2)]
    out.validate()


def test_without_progress_everything_unacknowledged_is_sent_again_and_then_fails() -> None:
    """In pauses that double, until the limit."""
    out = Outflow(window=4 * MIB, chunk=MIB, patience=1, tries=5)
    assert out.deadline() is None
    out.add(7, 2 * MIB, 10)
    assert out.deadline() == 11
    assert len(list(sends(out))) == 3
    assert out.tick(10.9) == []
    assert out.next(0) is None
    for now in (11.0, 13.0):
        assert out.tick(now) == []
        assert list(sends(out)) == [SendHeader(7), SendChunk(7, 0, MIB), SendChunk(7, MIB, MIB)]
    assert out.tick(14.9) == []
    assert out.tick(15.0) == [7]
    assert len(out) == 0
    assert out.deadline() is None


def test_what_is_slow_is_waited_for_as_long_as_it_moves() -> None:
    """A credit every 12 s, where nothing is known to begin with: nothing fails, and soon nothing is sent twice."""
    out = Outflow(window=MIB, chunk=MIB, patience=1, tries=30)
    out.add(1, 64 * MIB, 0)
    now, sent = 0.0, 0
    for number in range(1, 65):
        arrives = now + 12.0
        sent += len(list(sends(out, now)))
        while (due := out.deadline()) is not None and due < arrives:
            assert out.tick(due) == []
            sent += len(list(sends(out, due)))
        now = arrives
        assert out.credit(1, number * MIB, now) is (number == 64)
    assert sent < 64 + 20


def test_after_quick_answers_a_loss_is_noticed_quickly() -> None:
    """The pause follows what was measured; what was sent twice is not measured."""
    out = Outflow(window=4 * MIB, chunk=MIB, patience=2, tries=8)
    out.add(1, 4 * MIB, 0)
    list(sends(out, 0.0))
    out.credit(1, MIB, 0.01)
    assert out.deadline() == 0.01 + 0.5
    assert out.tick(0.51) == []
    list(sends(out, 0.51))
    out.credit(1, 2 * MIB, 5.0)
    assert out.deadline() == 5.0 + 1.0


def test_a_transfer_that_nobody_waits_for_is_not_measured() -> None:
    """The next one is, so that a loss is noticed quickly."""
    out = Outflow(window=4 * MIB, chunk=MIB, patience=2, tries=8)
    out.add(1, MIB, 0)
    list(sends(out, 0.0))
    out.drop(1)
    out.add(2, MIB, 1.0)
    list(sends(out, 1.0))
    out.credit(2, MIB, 1.01)
    out.add(3, MIB, 2.0)
    assert out.deadline() == 2.0 + 0.5


def test_what_the_receiver_misses_is_sent_again_at_once_and_only_once() -> None:
    """It repeats the same credit; the second loss of the same bytes is found by time."""
    out = Outflow(window=4 * MIB, chunk=MIB, patience=1, tries=8)
    out.add(1, 3 * MIB, 0)
    list(sends(out))
    out.credit(1, MIB, 0.1)
    out.credit(1, MIB, 0.2)
    again = [SendHeader(1), SendChunk(1, MIB, MIB), SendChunk(1, 2 * MIB, MIB)]
    assert list(sends(out)) == again
    out.credit(1, MIB, 0.3)
    assert out.next(0.3) is None
    assert out.tick(out.deadline() or 0) == []
    assert list(sends(out)) == again
    out.validate()


def test_late_strange_and_dropped_credits_change_nothing() -> None:
    """An older credit, one beyond the end, one of an unknown or dropped transfer."""
    out = Outflow(window=4 * MIB, chunk=MIB, patience=1, tries=1)
    out.add(1, 2 * MIB, 0)
    list(sends(out))
    out.credit(1, MIB, 0)
    due = out.deadline()
    for transfer, received in ((1, 0), (1, -1), (1, 3 * MIB), (9, 5)):
        assert out.credit(transfer, received, 0.9) is False
    assert out.next(0.9) is None
    assert out.deadline() == due
    out.drop(1)
    assert out.credit(1, 2 * MIB, 0) is False
    assert len(out) == 0


def test_a_credit_that_overtakes_the_resend_is_believed() -> None:
    """The time-out rewound; then the old credit comes."""
    out = Outflow(window=4 * MIB, chunk=MIB, patience=1, tries=3)
    out.add(1, 2 * MIB, 0)
    list(sends(out))
    out.tick(1)
    assert out.credit(1, 2 * MIB, 1.1) is True


def test_the_receiver_acknowledges_every_mib_and_the_end() -> None:
    """Not every chunk."""
    inflow = Inflow(LIMIT, Seen())
    half = MIB // 2
    inflow.header(hop(1, 5 * half), 0)
    effects = [effect for at in range(5) for effect in inflow.chunk(Chunk(SENDER, 1, at * half, 5 * half), half, 0)]
    grants = [Grant((SENDER, 1), MIB), Grant((SENDER, 1), 2 * MIB), Complete(hop(1, 5 * half)), Grant((SENDER, 1), 5 * half)]
    assert [effect for effect in effects if not isinstance(effect, Write)] == grants


def test_a_gap_is_told_once() -> None:
    """However many chunks follow it; the next gap is another one."""
    inflow = Inflow(LIMIT, Seen())
    inflow.header(hop(1, 600), 0)
    assert inflow.chunk(Chunk(SENDER, 1, 100, 600), 100, 0) == [Grant((SENDER, 1), 0)]
    assert inflow.chunk(Chunk(SENDER, 1, 200, 600), 100, 0) == []
    inflow.chunk(Chunk(SENDER, 1, 0, 600), 300, 0)
    assert inflow.chunk(Chunk(SENDER, 1, 400, 600), 100, 0) == [Grant((SENDER, 1), 300)]


def test_the_last_byte_waits_for_the_header() -> None:
    """So a lost header is sent again. A repeated chunk asks for the credit anew."""
    inflow = Inflow(LIMIT, Seen())
    chunk = Chunk(SENDER, 1, 0, 100)
    assert inflow.chunk(chunk, 100, 0) == [Write((SENDER, 1), 0, 0, 100)]
    assert inflow.chunk(chunk, 100, 0) == [Grant((SENDER, 1), 99)]
    assert inflow.header(hop(1, 100), 0) == [Complete(hop(1, 100)), Grant((SENDER, 1), 100)]
    assert inflow.header(hop(1, 100), 0) == [Grant((SENDER, 1), 100)]
    assert inflow.chunk(chunk, 100, 0) == [Grant((SENDER, 1), 100)]


@pytest.mark.parametrize(("offset", "size", "nbytes"), [(-1, 5, 100), (96, 5, 100), (0, 0, 100), (0, 5, 0), (0, 5, LIMIT + 1), (0, 5, 50)])
def test_chunks_that_do_not_fit_are_refused_and_change_nothing(offset: int, size: int, nbytes: int) -> None:
    """Also one whose transfer has another size."""
    inflow = Inflow(LIMIT, Seen())
    inflow.header(hop(1, 100), 0)
    with pytest.raises(PeerError):
        inflow.chunk(Chunk(SENDER, 1 if nbytes in (50, 100) else 2, offset, nbytes), size, 0)
    inflow.validate()
    assert inflow.chunk(Chunk(SENDER, 1, 0, 100), 100, 0)[-1] == Grant((SENDER, 1), 100)


def test_what_was_abandoned_is_let_go() -> None:
    """A dead sender's half tensor goes when the next transfer begins; a network's when it is not heard any more."""
    inflow = Inflow(LIMIT, Seen())
    inflow.header(hop(1, 100), 0)
    assert inflow.header(hop(2, 100), ABANDONED_AFTER + 1) == [Discard((SENDER, 1))]
    inflow.header(replace(hop(3, 100), network=NetworkId("other")), ABANDONED_AFTER + 1)
    assert inflow.forget(NET, {NodeId("other")}) == []
    assert inflow.forget(NET, {NodeId("b")}) == [Discard((SENDER, 2))]


def test_a_sender_that_is_gone_takes_its_half_tensors_along() -> None:
    """Header or not; those of others stay, and what it sent before is not taken twice."""
    inflow = Inflow(LIMIT, Seen())
    inflow.header(hop(1, 100), 0)
    inflow.chunk(Chunk(SENDER, 2, 0, 100), 50, 0)
    inflow.chunk(Chunk(PNodeId("other"), 3, 0, 100), 50, 0)
    inflow.header(hop(4, 100), 0)
    inflow.chunk(Chunk(SENDER, 4, 0, 100), 100, 0)
    assert inflow.release(SENDER, 1) == [Discard((SENDER, 1)), Discard((SENDER, 2))]
    assert inflow.chunk(Chunk(SENDER, 4, 0, 100), 100, 0) == [Grant((SENDER, 4), 100)]
    inflow.validate()
    inflow.chunk(Chunk(SENDER, 5, 0, 100), 50, 1)
    assert inflow.release(PNodeId("third"), ABANDONED_AFTER + 2) == [Discard((PNodeId("other"), 3)), Discard((SENDER, 5))]
