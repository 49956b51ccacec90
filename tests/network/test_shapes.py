"""Shapes of one node."""

from __future__ import annotations

import pytest

from dcnr.network.shapes import feed_of, is_cost, node_shapes, show, show_slots
from dcnr.nodes.registry import NODE_TYPES
from dcnr.nodes.spec import ShapeError


def test_fed_slots_are_filled_in() -> None:
    """Ids, targets and text each have their shape."""
    embedder, cost, tokenizer = NODE_TYPES["embedder"], NODE_TYPES["cost"], NODE_TYPES["tokenizer"]
    assert node_shapes(embedder, embedder.config.model_validate({"vocab_size": 9, "dim": 4, "seq_len": 3}), (None,)) == (((3,),), ((3, 4),))
    assert node_shapes(cost, cost.config(), ((3, 9), None)) == (((3, 9), (3,)), ((),))
    assert node_shapes(tokenizer, tokenizer.config.model_validate({"pad_length": 3}), (None,)) == (((),), ((3,),))


def test_wrong_inputs_raise_shape_error() -> None:
    """The rule of the type speaks."""
    linear = NODE_TYPES["linear"]
    with pytest.raises(ShapeError, match=r"wants a last axis of 5 \(in_dim\)"):
        node_shapes(linear, linear.config.model_validate({"in_dim": 5, "out_dim": 2}), ((3, 4),))


def test_feeds_and_costs() -> None:
    """Slots beyond the table need an edge."""
    assert feed_of(NODE_TYPES["cost"], 0) is None
    assert feed_of(NODE_TYPES["cost"], 1) == "targets"
    assert feed_of(NODE_TYPES["add"], 3) is None
    assert {name for name, row in NODE_TYPES.items() if is_cost(row)} == {"cost", "tied_lm_head_ce", "fused_lm_head"}


def test_words() -> None:
    """As files and people write them."""
    assert show((128, 512)) == "[128, 512]"
    assert (show_slots(1), show_slots(2)) == ("1 slot", "2 slots")
