"""The generated table of node types."""

from __future__ import annotations

from dcnr.network.document import node_table
from dcnr.nodes.registry import NODE_TYPES


def test_the_table_has_every_public_type_with_its_aliases_and_keys() -> None:
    """Internal types are left out; needed keys are bold and come first."""
    rows = node_table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [name for name, row in NODE_TYPES.items() if not row.internal]
    linear = next(row for row in rows if row.startswith("| `linear`"))
    assert linear.startswith("| `linear`, `dense` | **`in_dim`**, **`out_dim`**, `bias` = true, ")
    assert "**`input_dim`** (or `dim`)" in node_table()
    assert "The trainer feeds slot 1 unless an edge does." in next(row for row in rows if row.startswith("| `cost`"))
