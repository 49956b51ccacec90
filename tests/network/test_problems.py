"""How problems are collected and worded."""

from __future__ import annotations

import pytest

from dcnr.errors import NetworkFileError
from dcnr.network.problems import MAX_NAMES, MAX_PROBLEMS, Problems, nearest
from dcnr.network.spec import Place


def test_problems_are_raised_in_the_order_of_the_file() -> None:
    """Whatever the order in which they were found."""
    problems = Problems()
    problems.raise_if_any()
    problems.say(Place("f", 3, 1), "a", "later", "Mend it.")
    problems.say(Place("f", 1, 9), None, "first", "Mend it.")
    with pytest.raises(NetworkFileError) as caught:
        problems.raise_if_any()
    assert str(caught.value) == "f:1:9: first. Mend it.\nf:3:1: node 'a': later. Mend it."


@pytest.mark.parametrize(
    ("word", "remedy"), [("dimm", "Did you mean 'dim'?"), ("DIM", "Did you mean 'dim'?"), ("xyz", "Known keys: axis, dim, rate.")]
)
def test_nearest_names_one_or_all(word: str, remedy: str) -> None:
    """The nearest known word, in any case, or the whole list if none is near."""
    assert nearest(word, ["rate", "dim", "axis"], "keys") == remedy


def test_too_many_problems_end_the_reading() -> None:
    """A file that is no network at all does not keep anyone busy; nor does a word of a million letters."""
    problems = Problems()

    def complain() -> None:
        for line in range(1000):
            problems.say(Place("f", line + 1, 1), None, "x" * 10**6, "Mend it.")

    with pytest.raises(NetworkFileError, match="there are more than 200 problems") as caught:
        complain()
    assert len(caught.value.problems) == MAX_PROBLEMS + 1
    assert len(str(caught.value)) < 200 * 600


def test_long_lists_are_cut() -> None:
    """Nobody reads a hundred names."""
    assert nearest("x", [f"node_{index}" for index in range(100)], "nodes").count("node_") == MAX_NAMES
