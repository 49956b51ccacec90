"""Folding what repeats."""

from __future__ import annotations

import pytest
from hypothesis import given

from dcnr.ids import NodeId
from dcnr.network.picture import Arrow, block_of, blocks, picture
from tests.network.files import MANY, SHIPPED, Network, chain, networks, shipped


def test_ids_name_blocks() -> None:
    """Up to the first number that something follows."""
    assert block_of(NodeId("block_3_head_0")) == "block_3"
    assert block_of(NodeId("h12-ln")) == "h12"
    assert block_of(NodeId("head_0")) is None
    assert [(name, len(nodes)) for name, nodes in blocks(shipped("tiny")).items()] == [("block_0", 16), ("block_1", 16)]


def test_topology_2_fits_a_page() -> None:
    """Eight like blocks are one, eight like heads are one."""
    found = picture(shipped("topology_2"))
    assert len(found.boxes) == 15 + 7
    assert found.frames == {"block_0": "block_0 … block_7: 8 ×"}
    heads = next(box for box in found.boxes if box.type == "attention_head")
    assert (heads.title, heads.subtitle, len(heads.nodes)) == ("head_0 …", "8 × attention_head [512, 64]", 64)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_node_is_in_exactly_one_box(name: str) -> None:
    """Nothing is lost."""
    graph = shipped(name)
    assert sorted(node for box in picture(graph).boxes for node in box.nodes) == sorted(node.id for node in graph.nodes)


@MANY
@given(networks())
def test_arrows_lead_between_boxes(net: Network) -> None:
    """Whatever was folded."""
    found = picture(net.graph())
    names = {box.id for box in found.boxes}
    assert all(arrow.source in names and arrow.target in names and arrow.source != arrow.target for arrow in found.arrows)


def test_what_leaves_the_last_block_leaves_the_frame() -> None:
    """The arrow to the first node after the blocks starts at the folded block's end."""
    assert Arrow(NodeId("block_0_residual_ffn"), NodeId("final_ln")) in picture(shipped("topology_2")).arrows


def test_blocks_that_differ_are_not_folded() -> None:
    """Another width or another source keeps them apart."""
    layers = [(f"b{i}_{part}", "linear", {"in_dim": 8, "out_dim": 8, "bias": i == 0}) for i in range(2) for part in ("x", "y")]
    assert picture(chain(*layers).graph()).frames == {}
    alike = [(name, kind, {**config, "bias": True}) for name, kind, config in layers]
    assert picture(chain(*alike).graph()).frames == {"b0": "b0 … b1: 2 ×"}
