"""Pieces of shape rules."""

from __future__ import annotations

import pytest

from dcnr.nodes.registry import NODE_TYPES
from dcnr.nodes.rules import axis_of, elements, flops_per_element, known, last_axis, many, no_flops, one, sequence, two
from dcnr.nodes.spec import NodeConfig, ShapeError


def test_axes_count_from_either_end() -> None:
    """And must exist."""
    assert [axis_of(axis, (4, 5, 6)) for axis in (0, 2, -1, -3)] == [0, 2, 2, 0]
    for axis in (3, -4):
        with pytest.raises(ShapeError, match=rf"an input that has axis {axis}, got \[4, 5, 6\]"):
            axis_of(axis, (4, 5, 6))


def test_a_slot_that_needs_an_edge_says_which() -> None:
    """By its number."""
    assert known((), 1) == ()
    with pytest.raises(ShapeError, match="an edge into slot 1"):
        known(None, 1)


def test_widths_and_lengths() -> None:
    """The key of the config is named."""
    last_axis((7, 3), 3, "dim")
    sequence((7, 3), 3, "dim", 7)
    sequence((7, 3), 3, "dim", None)
    with pytest.raises(ShapeError, match=r"last axis of 3 \(dim\), got \[\]"):
        last_axis((), 3, "dim")
    with pytest.raises(ShapeError, match=r"wants \[seq, 3\] \(dim 3\), got \[1, 7, 3\]"):
        sequence((1, 7, 3), 3, "dim", 7)
    with pytest.raises(ShapeError, match=r"at most 6 positions \(seq_len\), got \[7, 3\]"):
        sequence((7, 3), 3, "dim", 6)


def test_counts() -> None:
    """Arities, elements and cheap flops."""
    config = NodeConfig()
    assert (one(config), two(config), elements((2, 3)), elements(())) == (1, 2, 6, 1)
    assert NODE_TYPES["add"].inputs is many
    assert flops_per_element(config, ((2, 3), (4,)), ()) == 10
    assert no_flops(config, ((2, 3),), ()) == 0
