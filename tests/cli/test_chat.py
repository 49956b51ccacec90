"""`dcnr chat`: how the turns become one text."""

from __future__ import annotations

import io
import sys

import pytest

from dcnr.cli.chat import Turns, line_typed
from dcnr.errors import UserError


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


async def test_bytes_that_are_no_text_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """In words, after the lines before them."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    with pytest.raises(UserError, match="stdin: invalid UTF-8"):
        await line_typed()
