"""`dcnr chat`: how the turns become one text."""

from __future__ import annotations

from dcnr.cli.chat import Turns


def test_without_names_every_turn_is_a_line() -> None:
    """Its answer ends with the line."""
    turns = Turns("", "")
    asked = turns.asked("", "hello")
    assert (asked, turns.stop) == ("hello\n", "\n")
    assert turns.asked(turns.answered(asked, "hi"), "and?") == "hello\nhi\nand?\n"


def test_with_names_a_turn_ends_where_yours_would_begin() -> None:
    """So that an answer may have several lines."""
    turns = Turns("ROMEO: ", "JULIET: ")
    asked = turns.asked("", "hello")
    assert (asked, turns.stop) == ("ROMEO: hello\nJULIET: ", "\nROMEO: ")
    assert turns.asked(turns.answered(asked, "hi\nyou"), "and?") == "ROMEO: hello\nJULIET: hi\nyou\nROMEO: and?\nJULIET: "
