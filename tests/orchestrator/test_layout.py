"""Where nodes go, and what a deployment is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dcnr.errors import DoesNotFit
from dcnr.ids import Epoch, NodeId, PNodeId
from dcnr.network.graph import Graph
from dcnr.orchestrator.layout import deploy_of, homes_for, homes_in, named, plan_of, scaler_at, wider
from dcnr.orchestrator.planning import prepared
from dcnr.orchestrator.state import AssignmentRecord, CheckpointRecord, SessionRecord
from tests.orchestrator.fakes import NETWORK, SESSION, graph, info, record
from tests.orchestrator.story import ONE, THREE, TWO, A, B, C, PNodes

SCALER: dict[str, int | float] = {"updates": 3, "loss_scale": 8.0, "good_steps": 3, "dynamic": True}
NOWHERE: dict[NodeId, PNodeId] = {}


def recovering(**fields: int) -> SessionRecord:
    """A session that trained already."""
    return replace(record(**fields), recovers=True)


def hosts(of: SessionRecord, offered: PNodes, before: dict[NodeId, PNodeId] = NOWHERE, avoid: tuple[PNodeId, ...] = ()) -> list[PNodeId]:
    """Who is chosen, by name."""
    return sorted(homes_for(graph(), of, offered, before, avoid).pnodes)


def test_a_start_waits_for_the_number_of_pnodes_that_is_wanted() -> None:
    """A recovery does not; but somebody must be there."""
    with pytest.raises(DoesNotFit, match="it needs 3 PNodes and 2 can take work"):
        homes_for(graph(), record(pnodes=3), TWO, {})
    assert hosts(recovering(pnodes=3), TWO) == [A, B]
    for of in (record(), recovering(pnodes=2)):
        with pytest.raises(DoesNotFit, match="it needs 1 PNode and 0 can take work"):
            homes_for(graph(), of, (), {})


def test_of_more_pnodes_than_wanted_those_that_take_part_come_first_and_then_the_roomiest() -> None:
    """So that the fewest nodes move, and what moves fits."""
    offered = (info("a", memory=1 << 28), info("b"), info("c", memory=1 << 31))
    assert hosts(record(pnodes=2), offered) == [B, C]
    before = dict.fromkeys(graph().by_id, A)
    assert hosts(recovering(pnodes=1), offered, before) == [A]


def test_what_a_survivor_holds_stays() -> None:
    """A newcomer takes what was lost."""
    before = dict(homes_for(graph(), record(), TWO, {}))
    after = homes_for(graph(), recovering(), (info("a"), info("c")), before)
    assert {node for node, home in after.items() if home == A} == {node for node, home in before.items() if home == A}
    assert set(after.pnodes) == {A, C}


def test_a_pnode_that_just_failed_is_avoided_where_it_fits_without() -> None:
    """And used where it does not."""
    assert hosts(recovering(), TWO, avoid=(B,)) == [A]
    assert hosts(recovering(), ONE, avoid=(A,)) == [A]
    assert B in hosts(recovering(), (info("a", memory=100), info("b")), avoid=(B,))


def test_a_survivor_that_is_too_small_is_left_where_others_have_the_room() -> None:
    """With a number of PNodes that is wanted, it may be one too many."""
    first, *rest = graph().by_id
    before = {first: A} | dict.fromkeys(rest, PNodeId("gone"))
    offered = (info("a", memory=1), info("b"), info("c"))
    assert hosts(recovering(pnodes=1), offered, before) in ([B], [C])


def test_who_spreads_stays_where_it_is() -> None:
    """Of roomier newcomers it takes as many as it wants more, the roomiest first."""
    before = dict(homes_for(graph(), record(), TWO, {}))
    offered = (*TWO, *(info(name, memory=1 << (31 + at)) for at, name in enumerate("cde")))
    spread = wider(graph(), record(pnodes=3), offered, before)
    assert spread is not None
    assert set(spread.pnodes) == {A, B, PNodeId("e")}
    assert wider(graph(), record(pnodes=2), offered, before) is None


def test_what_does_not_fit_is_said_in_numbers() -> None:
    """By placement."""
    with pytest.raises(DoesNotFit, match="MiB"):
        homes_for(graph(), record(), (info("a", memory=100),), {})
    with pytest.raises(DoesNotFit, match=r"a 0\.0 MiB"):
        homes_for(graph(), record(), (replace(info("a"), memory_used=1 << 31),), {})


def test_a_deployment_starts_from_the_newest_checkpoint_or_from_the_seed() -> None:
    """Step, key and scaler belong together; peers are those that take part."""
    homes = dict(homes_for(graph(), record(), TWO, {}))
    seed = deploy_of(record(), graph(), homes, THREE, ("file:///data", "probe-1"))
    assert (seed.step, seed.checkpoint, seed.state["updates"], seed.peers, seed.probe) == (0, None, 0, TWO, "probe-1")
    known = (CheckpointRecord(2, "k2", SCALER), CheckpointRecord(5, "k5", SCALER))
    at = replace(record(), step=5, checkpoints=known)
    later = deploy_of(at, graph(), homes, THREE, ("file:///data", None))
    assert (later.step, later.checkpoint, later.state, later.decides) == (5, "k5", SCALER, False)
    assert deploy_of(at, graph(), dict.fromkeys(homes, A), THREE, ("", None)).decides


def test_the_scaler_of_the_seed_follows_the_precision() -> None:
    """float16 anywhere has a scale that moves."""
    assert not scaler_at(record(), graph()).dynamic
    half: Graph = prepared(NETWORK.replace("name: small", "name: small\nprecision: float16"), "small.yml", fuse=True)
    assert scaler_at(record(), half).dynamic


def test_the_plan_of_one_pnode_lets_it_decide() -> None:
    """The window has one micro-batch more than there are segments."""
    homes = dict(homes_for(graph(), record(), TWO, {}))
    plan = plan_of(replace(record(), epoch=Epoch(3)), graph(), homes, PNodeId("t"))
    assert (plan.decides, plan.window, plan.hosts, plan.address.epoch) == (False, 3, (A, B), 3)
    assert plan_of(record(), graph(), dict.fromkeys(homes, A), PNodeId("t")).decides


def test_a_stored_assignment_counts_only_for_the_same_nodes() -> None:
    """Another version may prepare another graph."""
    homes = dict(homes_for(graph(), record(), TWO, {}))
    stored = AssignmentRecord(SESSION, Epoch(1), named(homes))
    assert homes_in(stored, graph()) == homes
    assert homes_in(replace(stored, nodes={"other": A}), graph()) == {}
