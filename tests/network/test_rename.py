"""A clone of a network file differs from it in its name and in nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dcnr.errors import UserError
from dcnr.ids import NetworkId
from dcnr.network.load import load_graph
from dcnr.network.rename import renamed

NETWORKS = Path(__file__).parents[2] / "networks"
BODY = "\nnodes: [{id: name, type: relu, config: {name: tiny}}]  # name: tiny\n"


@pytest.mark.parametrize("file", ["tiny.yml", "mlp.yml", "topology_1.yml"])
def test_a_shipped_network_keeps_everything_but_its_name(file: str) -> None:
    """One line differs, and the graph only in its name."""
    text = (NETWORKS / file).read_text()
    other = renamed(text, NetworkId("another_one"))
    changed = [(old, new) for old, new in zip(text.splitlines(), other.splitlines(), strict=True) if old != new]
    assert [new for _, new in changed] == ["name: another_one"]
    assert load_graph(other, file) == replace(load_graph(text, file), name=NetworkId("another_one"))


@pytest.mark.parametrize(
    ("line", "name", "wanted"),
    [
        ("name: tiny  # é, a comment", "new", "name: new  # é, a comment"),
        ('name: "tiny"', "new", 'name: "new"'),
        ("'name' : 'tiny'", "new", "'name' : 'new'"),
        ("name: tiny", "null", 'name: "null"'),
        ("name: tiny", "17", 'name: "17"'),
        ("name:\n  tiny", "new", "name:\n  new"),
    ],
)
def test_only_the_value_is_replaced(line: str, name: str, wanted: str) -> None:
    """Quotes and comments stay; a word that YAML takes for something else is quoted; other keys called name are left alone."""
    assert renamed(f"# name: tiny\n{line}{BODY}", NetworkId(name)) == f"# name: tiny\n{wanted}{BODY}"


@pytest.mark.parametrize("line", ["name: &n tiny", 'name: "t\\x69ny"', "name: |\n  tiny", "name: *word", "nam: tiny"])
def test_a_name_that_is_no_plain_word_is_refused(line: str) -> None:
    """Replacing it could change other text."""
    with pytest.raises(UserError, match="does not stand behind its key"):
        renamed(f"wire: &word tiny\n{line}{BODY}", NetworkId("new"))
