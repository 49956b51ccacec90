"""The border of a VNode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcnr.agents.vnode import Offer, Turn, VNode

MICRO_BATCHES = 2


@pytest.fixture
def vnode() -> Iterator[VNode]:
    """Two inputs, one gradient, two micro-batches, nothing decided."""
    made = VNode(inputs=2, gradients=1, micro_batches=MICRO_BATCHES, step=0)
    yield made
    made.validate()


def fill(vnode: VNode, turn: Turn) -> None:
    """Offer both inputs."""
    assert vnode.offer("fwd", turn, 0) is Offer.TAKEN
    assert vnode.offer("fwd", turn, 1) is Offer.TAKEN


def test_it_is_ready_when_all_inputs_are_here(vnode: VNode) -> None:
    """One of two inputs is not enough."""
    vnode.offer("fwd", Turn(1, 0), 1)
    assert not vnode.ready("fwd")
    vnode.offer("fwd", Turn(1, 0), 0)
    assert vnode.ready("fwd")


def test_micro_batches_run_in_index_order(vnode: VNode) -> None:
    """Micro-batch 1 that came first waits for micro-batch 0."""
    fill(vnode, Turn(1, 1))
    assert not vnode.ready("fwd")
    fill(vnode, Turn(1, 0))
    assert vnode.ready("fwd")
    vnode.run("fwd")
    assert vnode.next("fwd") == Turn(1, 1)
    assert vnode.ready("fwd")


def test_a_later_step_waits_until_the_one_before_was_decided(vnode: VNode) -> None:
    """Step 2 is taken early, and runs only after step 1 was decided."""
    fill(vnode, Turn(2, 0))
    assert not vnode.ready("fwd")
    vnode.decide(1)
    assert vnode.ready("fwd")


def test_duplicates_are_taken_once(vnode: VNode) -> None:
    """The second copy of an input changes nothing."""
    assert vnode.offer("fwd", Turn(1, 0), 0) is Offer.TAKEN
    assert vnode.offer("fwd", Turn(1, 0), 0) is Offer.DUPLICATE
    assert not vnode.ready("fwd")


def test_what_ran_or_was_decided_is_stale(vnode: VNode) -> None:
    """Inputs of a turn that ran, of a decided step or of no micro-batch are stale."""
    fill(vnode, Turn(1, 0))
    vnode.run("fwd")
    assert vnode.offer("fwd", Turn(1, 0), 0) is Offer.STALE
    assert vnode.offer("fwd", Turn(1, MICRO_BATCHES), 0) is Offer.STALE
    vnode.decide(1)
    assert vnode.offer("fwd", Turn(1, 1), 0) is Offer.STALE


def test_a_backward_runs_only_after_its_forward(vnode: VNode) -> None:
    """A gradient that is here too early waits."""
    vnode.offer("bwd", Turn(1, 0), 0)
    assert not vnode.ready("bwd")
    fill(vnode, Turn(1, 0))
    vnode.run("fwd")
    assert vnode.ready("bwd")


def test_a_finished_step_is_not_begun_again(vnode: VNode) -> None:
    """After the last micro-batch nothing is ready before the decision."""
    for micro in range(MICRO_BATCHES):
        fill(vnode, Turn(1, micro))
        vnode.run("fwd")
    assert not vnode.ready("fwd")


ARRIVALS = [(phase, step, micro, index) for phase in ("fwd", "bwd") for step in (1, 2) for micro in (0, 1) for index in (0, 1)]


@given(st.permutations(ARRIVALS))
def test_any_order_of_arrival_gives_the_same_order_of_turns(arrivals: list[tuple[str, int, int, int]]) -> None:
    """Whatever comes when, forwards and backwards run by step and micro-batch."""
    vnode = VNode(inputs=2, gradients=2, micro_batches=2, step=0)
    ran: dict[str, list[Turn]] = {"fwd": [], "bwd": []}
    for phase, step, micro, index in arrivals:
        vnode.offer(phase, Turn(step, micro), index)
        while any(vnode.ready(one) for one in ("bwd", "fwd")):
            one = "bwd" if vnode.ready("bwd") else "fwd"
            ran[one].append(vnode.next(one))
            vnode.run(one)
            if vnode.next("bwd").micro == 2:
                vnode.decide(vnode.decided + 1)
            vnode.validate()
    turns = [Turn(step, micro) for step in (1, 2) for micro in (0, 1)]
    assert ran == {"fwd": turns, "bwd": turns}


def test_a_step_that_is_begun_again_has_nothing_of_before(vnode: VNode) -> None:
    """One micro-batch ran and the next is half here: all of it must come again, and is no duplicate; step 2 waits as before."""
    fill(vnode, Turn(1, 0))
    vnode.run("fwd")
    vnode.offer("fwd", Turn(1, 1), 0)
    fill(vnode, Turn(2, 0))
    vnode.renew(1)
    assert vnode.next("fwd") == Turn(1, 0)
    assert not vnode.ready("fwd")
    for micro in range(MICRO_BATCHES):
        fill(vnode, Turn(1, micro))
        assert vnode.ready("fwd")
        vnode.run("fwd")
    vnode.decide(1)
    assert vnode.ready("fwd")


def test_a_later_step_can_begin_again_before_its_turn(vnode: VNode) -> None:
    """Only what waits for it goes: the step under way keeps its place."""
    fill(vnode, Turn(1, 0))
    vnode.run("fwd")
    fill(vnode, Turn(2, 0))
    vnode.renew(2)
    assert vnode.next("fwd") == Turn(1, 1)
    vnode.decide(1)
    assert not vnode.ready("fwd")
    fill(vnode, Turn(2, 0))
    assert vnode.ready("fwd")


def test_a_decided_step_is_not_begun_again(vnode: VNode) -> None:
    """It is over."""
    vnode.decide(1)
    vnode.renew(1)
    assert vnode.next("fwd") == Turn(2, 0)
