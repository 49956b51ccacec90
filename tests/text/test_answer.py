"""What may be shown of a text that is still being generated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dcnr.text.answer import said


def test_half_a_character_is_held_back() -> None:
    """Until its last byte is there, or nothing more comes."""
    euro = "a€".encode()
    assert [said(euro[:count].decode(errors="replace"), [], done=False) for count in (1, 2, 3, 4)] == ["a", "a", "a", "a€"]
    assert said(euro[:3].decode(errors="replace"), [], done=True) == "a\ufffd"


def test_bytes_that_are_no_character_are_shown_when_more_follows() -> None:
    """A network may write such."""
    assert said(b"a\xffb".decode(errors="replace"), [], done=False) == "a\ufffdb"


def test_a_stop_text_ends_it_and_its_beginning_is_held_back() -> None:
    """Several may be given; the one that is complete first counts."""
    assert said("one\n\ntwo END", ["END", "\n\n"], done=True) == "one"
    assert said("one\n", ["\n\n"], done=False) == "one"
    assert said("one\n", ["\n\n"], done=True) == "one\n"
    assert said("one\nt", ["\n\n"], done=False) == "one\nt"


@given(st.text("ab\n€", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_shown_text_is_never_taken_back(text: str, stops: list[str]) -> None:
    """Byte after byte, what is shown is a beginning of what is shown in the end."""
    data = text.encode()
    shown = [said(data[:count].decode(errors="replace"), stops, done=False) for count in range(len(data) + 1)]
    end = said(text, stops, done=True)
    assert all(end.startswith(one) for one in shown)
    assert not any(stop in end for stop in stops)
