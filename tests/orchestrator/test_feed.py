"""What the trainer sends into a graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dcnr.errors import UserError
from dcnr.ids import Epoch, NetworkId, NodeId, PNodeId
from dcnr.orchestrator.feed import Address, Feeds, batch_of, costs_of, eval_hops, feeds_of, micro_hops, windows_of
from tests.orchestrator.fakes import SESSION, graph


def test_ids_go_to_the_embedder_and_targets_to_the_cost() -> None:
    """In a prepared graph the cost is the node that absorbed it."""
    assert feeds_of(graph()) == Feeds(((NodeId("embed"), 0),), ((NodeId("loss"), 1),), 4)
    assert costs_of(graph()) == ("loss",)


def test_a_network_that_takes_no_ids_is_refused() -> None:
    """The user is told what is missing."""
    with pytest.raises(UserError, match=r"no node takes token ids \(add an embedder that no edge leads to\)"):
        feeds_of(replace(graph(), nodes=graph().nodes[1:]))


def test_weight_counts_the_targets_of_the_whole_step_that_count() -> None:
    """Negative targets are none; a batch without any has a finite weight."""
    tokens = np.array([[1, 2, -1], [3, -1, -1]])
    batch = batch_of(tokens)
    assert batch.weight == 1.0
    assert batch_of(np.ones((2, 3), np.int64)).weight == 1 / 4
    assert batch_of(np.full((2, 3), -1)).weight == 1.0


def test_windows_that_the_split_does_not_fill_have_ids_and_no_targets() -> None:
    """-1 is no id; the weight is that of the targets there are, and the hops are of the validation, whose payload is all of it."""
    batch = windows_of(np.array([[1, 2, 3], [3, 4, -1], [4, -1, -1]]))
    np.testing.assert_array_equal(batch.ids_BT, [[1, 2], [3, 4], [4, 0]])
    np.testing.assert_array_equal(batch.targets_BT, [[2, 3], [4, -1], [-1, -1]])
    assert (batch.counted, batch.weight) == (3, 1 / 3)
    a, cost = PNodeId("a"), NodeId("cost")
    address = Address(NetworkId("n"), SESSION, Epoch(3), PNodeId("t"), {NodeId("x"): a, cost: a})
    hops = eval_hops(batch, Feeds(((NodeId("x"), 0),), ((cost, 1),), 2), address, (5, 7, 2))
    for _, hop, payload in hops:
        assert (hop.phase, hop.step, hop.micro, hop.attempt, payload.shape) == ("eval", 5, 7, 2, (3, 2))
    assert [hop.weight for _, hop, _ in hops] == [0.0, 1 / 3]


def test_a_pnode_gets_ids_once_however_many_slots_read_them() -> None:
    """Slots of one PNode share a hop; another PNode gets its own."""
    a, b = PNodeId("a"), PNodeId("b")
    homes = {NodeId("x"): a, NodeId("y"): b, NodeId("z"): a, NodeId("cost"): b}
    slots = tuple((NodeId(name), 0) for name in ("x", "y", "z"))
    feeds = Feeds(slots, ((NodeId("cost"), 1),), 2)
    address = Address(NetworkId("n"), SESSION, Epoch(3), PNodeId("t"), homes)
    batch = batch_of(np.arange(12).reshape(4, 3))
    hops = micro_hops(batch, feeds, address, 5, 3, (1, 2))
    assert [(to, hop.targets, hop.source_slot) for to, hop, _ in hops] == [
        (a, (("x", 0), ("z", 0)), 0), (b, (("y", 0),), 0), (b, (("cost", 1),), 1),
    ]  # fmt: skip
    for _, hop, payload in hops:
        assert (hop.step, hop.micro, hop.attempt, hop.epoch) == (5, 1, 3, 3)
        assert (hop.phase, hop.source, hop.shape) == ("fwd", "trainer", (2, 2))
        assert payload.flags.c_contiguous
    np.testing.assert_array_equal(hops[2][2], [[7, 8], [10, 11]])
