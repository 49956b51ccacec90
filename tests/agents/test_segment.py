"""What a segment may do next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcnr.agents.routing import find_routes
from dcnr.agents.segment import Segment
from dcnr.agents.vnode import Offer, Turn
from dcnr.errors import InvariantError
from tests.agents.tiny import A, B, graph_of


def segment_of(pnode: str, *on_b: str) -> Segment:
    """The only segment of `pnode`, where `on_b` are on `b`; two micro-batches."""
    graph = graph_of()
    routes = find_routes(graph, {node.id: B if node.id in on_b else A for node in graph.nodes}, B if pnode == "b" else A)
    (only,) = routes.segments
    return Segment(only, micro_batches=2, step=0)


@pytest.fixture
def waits() -> Iterator[Segment]:
    """The heads on a PNode of their own: one input, two outputs, a gradient for each."""
    segment = segment_of("b", "head_0", "head_1")
    yield segment
    segment.validate()


@pytest.fixture
def turns() -> Iterator[Segment]:
    """The cost alone: logits and targets in, the gradient of the logits out."""
    segment = segment_of("b", "loss")
    yield segment
    segment.validate()


def test_a_segment_with_a_cost_does_forward_and_backward_at_once(turns: Segment) -> None:
    """Its work has inputs, the weight that came with the targets, and no gradients to wait for."""
    turns.offer("fwd", Turn(1, 0), 0, "logits")
    assert turns.priority() is None
    turns.offer("fwd", Turn(1, 0), 1, "targets", 0.25)
    work = turns.take()
    assert (work.turn, work.inputs, work.weights, work.gradients) == (Turn(1, 0), ("logits", "targets"), (0.0, 0.25), ())
    assert turns.priority() is None


def test_backward_goes_before_forward(waits: Segment) -> None:
    """With both ready, the gradient of micro-batch 0 goes before the activation of micro-batch 1."""
    waits.offer("fwd", Turn(1, 0), 0, "x0")
    assert waits.take().gradients is None
    waits.offer("fwd", Turn(1, 1), 0, "x1")
    waits.offer("bwd", Turn(1, 0), 0, "g0")
    waits.offer("bwd", Turn(1, 0), 1, "g1")
    backward = waits.take()
    assert (backward.inputs, backward.gradients) == (None, ("g0", "g1"))
    assert waits.take().inputs == ("x1",)


def test_it_is_done_when_every_backward_was_given_out(waits: Segment) -> None:
    """Two micro-batches, forward and backward each."""
    for micro in range(2):
        waits.offer("fwd", Turn(1, micro), 0, "x")
        waits.take()
        assert not waits.done()
        waits.offer("bwd", Turn(1, micro), 0, "g")
        waits.offer("bwd", Turn(1, micro), 1, "g")
        waits.take()
    assert waits.done()
    waits.decide(1)
    assert not waits.done()


def test_a_later_step_waits_for_the_decision(turns: Segment) -> None:
    """What came for step 2 runs right after step 1 was decided, and what is left of step 1 is forgotten."""
    turns.offer("fwd", Turn(1, 1), 0, "left over")
    turns.offer("fwd", Turn(2, 0), 0, "logits")
    turns.offer("fwd", Turn(2, 0), 1, "targets", 0.5)
    assert turns.priority() is None
    turns.decide(1)
    assert turns.take().turn == Turn(2, 0)
    assert turns.offer("fwd", Turn(1, 1), 0, "late") is Offer.STALE


def test_a_step_that_is_begun_again_starts_with_its_first_micro_batch(waits: Segment) -> None:
    """Whatever ran or waited is forgotten, also a gradient; what waits for the next step stays."""
    waits.offer("fwd", Turn(1, 0), 0, "x0")
    waits.take()
    waits.offer("fwd", Turn(1, 1), 0, "x1")
    waits.offer("bwd", Turn(1, 0), 0, "g0")
    waits.offer("fwd", Turn(2, 0), 0, "later")
    assert waits.begun()
    waits.renew(1)
    assert not waits.begun()
    assert waits.priority() is None
    for micro in range(2):
        assert waits.offer("fwd", Turn(1, micro), 0, f"again {micro}") is Offer.TAKEN
        assert waits.take().inputs == (f"again {micro}",)
    for micro in range(2):
        for index in range(2):
            assert waits.offer("bwd", Turn(1, micro), index, f"g{index}") is Offer.TAKEN
        assert waits.take().gradients == ("g0", "g1")
    assert waits.done()
    waits.decide(1)
    assert waits.take().inputs == ("later",)


def test_taking_work_that_is_not_there_is_a_bug(turns: Segment) -> None:
    """`take` without `priority` raises."""
    with pytest.raises(InvariantError, match="nothing to do"):
        turns.take()
