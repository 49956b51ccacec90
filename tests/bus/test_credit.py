"""Windows and the memory of what has arrived."""

from __future__ import annotations

import pytest

from dcnr.bus.credit import ACK_EVERY, MIN_WINDOW, RECEIVER_WINDOW, SENDERS, Seen, window
from dcnr.ids import PNodeId


@pytest.mark.parametrize(("peers", "mib"), [(0, 4), (1, 4), (8, 4), (9, 32 / 9), (16, 2), (100, 2)])
def test_flows_share_the_receivers_window(peers: int, mib: float) -> None:
    """4 MiB each, 32 MiB together, never below 2."""
    assert window(peers) == int(mib * (1 << 20))
    assert window(peers) * min(peers, 16) <= RECEIVER_WINDOW


def test_a_sender_never_waits_for_an_acknowledgement_that_is_not_due() -> None:
    """The smallest window holds an acknowledgement's worth and another chunk."""
    assert MIN_WINDOW >= 2 * ACK_EVERY


def test_seen_remembers_the_last_transfers_of_each_sender() -> None:
    """Bounded per sender, so that one cannot push out another's."""
    seen, a, b = Seen(remembered=3), PNodeId("a"), PNodeId("b")
    assert seen.add((b, 1))
    assert [seen.add((a, number)) for number in (1, 2, 2, 3, 4)] == [True, True, False, True, True]
    assert [(a, number) in seen for number in (1, 2, 3, 4)] == [False, True, True, True]
    assert (b, 1) in seen


def test_of_many_senders_those_that_sent_last_are_remembered() -> None:
    """Names that come and go do not fill the memory, and do not push out those that stay."""
    seen, stays = Seen(), PNodeId("stays")
    seen.add((stays, 0))
    for number in range(SENDERS + 10):
        assert seen.add((PNodeId(f"p{number}"), 1))
        assert seen.add((stays, number + 1))
    assert (PNodeId("p10"), 1) not in seen
    assert (PNodeId("p11"), 1) in seen
    assert (stays, SENDERS) in seen
