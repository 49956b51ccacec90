"""Where a checkpoint that is read goes, and what its PNodes are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dcnr.errors import DoesNotFit
from dcnr.ids import Epoch, PNodeId, is_id
from dcnr.orchestrator.source import SLOTS, deploy_to_read, homes_to_read
from dcnr.placement.cost import reading_costs
from tests.orchestrator.fakes import info
from tests.orchestrator.reader import source


def test_the_name_is_that_of_the_checkpoint() -> None:
    """Another one for another step, number of PNodes, or training under the same name; it can stand in subjects."""
    names = {one.name for one in (source(), source(step=4), source(pnodes=2), source(weights="other"), source(fuse=False))}
    assert len(names) == 5
    assert source().name == source().name
    assert all(is_id(name) for name in names)
    assert source().shown == "s@3"


def test_as_many_as_it_takes_the_roomiest_first() -> None:
    """One that holds all of it is enough; small ones share it."""
    need = sum(cost.bytes for cost in reading_costs(source().graph, SLOTS).values())
    roomy, other = replace(info("b"), memory_total=2 * need), replace(info("a"), memory_total=need)
    assert set(homes_to_read(source(), [other, roomy]).pnodes) == {"b"}
    small = [replace(info(name), memory_total=int(0.7 * need)) for name in "abc"]
    assert len(homes_to_read(source(), small).pnodes) == 2
    with pytest.raises(DoesNotFit, match=r"free are a .* \(start more or larger PNodes\)"):
        homes_to_read(source(), [replace(info(name), memory_total=need // 20) for name in "abc"])


def test_who_failed_is_left_out_if_it_fits_without() -> None:
    """If nobody else is there, it is tried again."""
    assert set(homes_to_read(source(), [info("a"), info("b")], {PNodeId("a")}).pnodes) == {"b"}
    assert set(homes_to_read(source(), [info("a")], {PNodeId("a")}).pnodes) == {"a"}


def test_a_deploy_says_all_that_a_reader_needs() -> None:
    """Under a name of its own, with the checkpoint; peers are those that take part."""
    offered = [info("a"), info("b")]
    homes = homes_to_read(source(), offered)
    deploy = deploy_to_read(source(), Epoch(7), homes, offered, (PNodeId("me"), "file:///x", "probe"))
    assert deploy.purpose == "generate"
    assert deploy.reader == PNodeId("me")
    assert str(deploy.network) == source().name
    assert (deploy.batch, deploy.step, deploy.checkpoint) == (SLOTS, 3, source().key)
    assert {peer.pnode for peer in deploy.peers} == set(homes.pnodes)
    assert not deploy.decides
