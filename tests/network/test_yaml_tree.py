"""YAML read strictly: values, places, limits."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcnr.errors import NetworkFileError
from dcnr.network.problems import Problems
from dcnr.network.spec import Scalar
from dcnr.network.yaml_tree import MAX_BYTES, Leaf, Mapped, Sequence, Tree, read_tree, scalar
from tests.network.files import MANY


def read(text: str) -> tuple[Tree, list[str]]:
    """The tree, and problems in words."""
    problems = Problems()
    tree = read_tree(text, "f.yml", problems)
    return tree, [str(problem) for problem in problems.found]


def refused(text: str) -> str:
    """Why there is no tree."""
    with pytest.raises(NetworkFileError) as caught:
        read(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("10000", 10000), ("-3", -3), ("0x1F", 31), ("0o17", 15), (".5", 0.5), ("1.", 1.0), ("+2.5E3", 2500.0),
        ("no", "no"), ("yes", "yes"), ("on", "on"), ("off", "off"), ("y", "y"), ("true", True), ("False", False), ("null", None),
        ("~", None), ("012", 12), ("1_000", "1_000"), ("12:30", "12:30"), ("2024-01-01", "2024-01-01"), ("=", "="),
        ("-.inf", -math.inf),
        ("9" * 5000, "9" * 5000),
    ],
)  # fmt: skip
def test_plain_scalars_are_those_of_yaml_1_2(text: str, value: Scalar) -> None:
    """Numbers and words mean what the core schema says, and nothing of YAML 1.1."""
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


def test_nan_is_a_number() -> None:
    """.nan is not a word."""
    found = scalar(".nan")
    assert isinstance(found, float)
    assert math.isnan(found)


def test_quoted_scalars_are_strings() -> None:
    """Quotes win over what the text looks like."""
    tree, _ = read("['1', \"true\", 1]")
    assert isinstance(tree, Sequence)
    assert [leaf.value for leaf in tree.items if isinstance(leaf, Leaf)] == ["1", "true", 1]


def test_every_value_and_key_knows_its_place() -> None:
    """Lines and columns count from 1."""
    tree, problems = read("a: 1\nbc:\n  - x\n  - {d: y}\n")
    assert problems == []
    assert isinstance(tree, Mapped)
    assert (tree.key_places["bc"].line, tree.key_places["bc"].column) == (2, 1)
    inner = tree.items["bc"]
    assert isinstance(inner, Sequence)
    assert (inner.items[1].place.line, inner.items[1].place.column) == (4, 5)


def test_aliases_are_followed() -> None:
    """An alias is the value of its anchor."""
    tree, problems = read("a: &x {b: 1}\nc: *x\n")
    assert isinstance(tree, Mapped)
    assert problems == []
    assert tree.items["c"] is tree.items["a"]


def test_all_that_is_odd_is_reported_at_once() -> None:
    """Duplicate keys, tags and keys that are no words do not hide each other."""
    _, problems = read("a: 1\na: 2\nb: !!python/name:os.system x\n? [1]\n: 2\n")
    assert problems == [
        "f.yml:2:1: the key 'a' stands twice (first in line 1). Remove one of the two.",
        "f.yml:3:4: the tag tag:yaml.org,2002:python/name:os.system is not allowed. Remove it; put strings in quotes.",
        "f.yml:4:3: a key is a list. Use a plain word as the key.",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.yml:1:1: the file is empty. Write a network: name, nodes, edges, costs."),
        ("# nothing\n", "f.yml:1:1: the file is empty. Write a network: name, nodes, edges, costs."),
        ("a: 1\n---\nb: 2\n", "f.yml:2:1: there is a second document. Keep one network per file; remove the '---'."),
        ("a: *b", "f.yml:1:4: the alias *b has no anchor before it. Write &b on the value it stands for, further up."),
        ("a: &a [*a]", "f.yml:1:8: the alias *a has no anchor before it. Write &a on the value it stands for, further up."),
        ("é\na\x00", "f.yml:2:2: character U+0000 is not allowed in YAML. Remove it; save the file as UTF-8 text."),
    ],
)
def test_what_is_no_tree_is_refused(text: str, message: str) -> None:
    """One problem that says where."""
    assert refused(text) == message


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "\t- x", "x: 'abc", "- 1\nb: 2", "{a: 1]"])
def test_syntax_errors_have_a_line(text: str) -> None:
    """What the parser says is passed on with its place."""
    assert ": this is not YAML: " in refused(text)
    assert refused(text).startswith("f.yml:")


def test_billion_laughs_die_young() -> None:
    """Aliases of aliases are counted, not expanded."""
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    text += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30))
    assert "more than 200000 values, aliases expanded" in refused(text)


def test_depth_is_limited_before_the_stack_is() -> None:
    """Also where aliases make the depth."""
    assert "nested more than 32 deep" in refused("[" * 100)
    assert "nest" in refused("[" * 100_000)
    text = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 40))
    assert "nested more than 32 deep" in refused(text)
    read("[" * 32 + "]" * 32)


def test_size_is_limited() -> None:
    """A file of more than 4 MiB is not looked at."""
    assert refused("#" * (MAX_BYTES + 1)).startswith("f.yml: the file is larger than 4194304 bytes")


@MANY
@given(st.text(max_size=80))
def test_any_text_is_a_tree_or_a_network_file_error(text: str) -> None:
    """No other exception gets out, whatever the file holds."""
    with contextlib.suppress(NetworkFileError):
        read(text)
