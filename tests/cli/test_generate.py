"""`dcnr generate`: what is asked for, and what is shown."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from click.testing import CliRunner

from dcnr.bus.memory import MemoryBroker
from dcnr.cli.generate import generate, stream, wanted, write
from dcnr.client.cluster import Cluster
from dcnr.client.generation import Piece
from dcnr.errors import NotFound, UserError

OPTIONS: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "stop": ("x", "y"), "no_cache": True, "pnodes": 0}


def test_a_source_is_a_session_or_a_step_of_one() -> None:
    """And the options are the fields of the verb."""
    assert wanted("s", OPTIONS) == {
        "session": "s", "step": None, "temperature": 0.5, "top_k": 3, "stop": ["x", "y"], "cache": False, "pnodes": 0,
    }  # fmt: skip
    assert wanted("s@12", OPTIONS)["step"] == 12


def test_newlines_and_tabs_of_a_stop_text_are_written_as_escapes() -> None:
    """As a shell passes them on."""
    assert wanted("s", {**OPTIONS, "stop": (r"\n\n", "\n", r"a\t")})["stop"] == ["\n\n", "\n", "a\t"]


@pytest.mark.parametrize("source", ["s@", "s@x", "s@-1", "s@1@2", "s@²", "s@" + "9" * 17, "s@" + "9" * 5000])
def test_a_step_is_a_number(source: str) -> None:
    """Said before anybody is asked."""
    with pytest.raises(UserError, match="is not a step"):
        wanted(source, OPTIONS)


async def test_pieces_are_shown_as_they_come_and_waiting_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text to stdout, reasons to stderr: not into the line that the prompt begins."""
    order: list[str] = []

    def show(text: str) -> None:
        order.append(text)
        order.append(capsys.readouterr().err)
        write(text)

    async def pieces(_cluster: Cluster, **_wanted: object) -> AsyncGenerator[Piece, None]:
        for text, waits in (("", "it needs a PNode"), ("", "it needs a PNode"), ("", "deploys to a"), ("so ", ""), ("it goes", "")):
            yield Piece(text, 1, 1, 1, False, False, "", waits)

    monkeypatch.setattr(Cluster, "pieces", pieces)
    text, last = await stream(Cluster(MemoryBroker().connect()), {}, show, "and ")
    assert (text, last.text) == ("so it goes", "it goes")
    assert order == ["and so ", "it needs a PNode\ndeploys to a\n", "it goes", "", "\n", ""]


async def test_a_text_without_tokens_shows_its_prompt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As one that ends at once."""

    async def pieces(_cluster: Cluster, **_wanted: object) -> AsyncGenerator[Piece, None]:
        yield Piece("", 0, 1, 1, True, False, "stop", "")

    monkeypatch.setattr(Cluster, "pieces", pieces)
    assert (await stream(Cluster(MemoryBroker().connect()), {}, write, "and "))[0] == ""
    assert capsys.readouterr().out == "and \n"


async def _nothing() -> AsyncGenerator[Piece, None]:
    for piece in list[Piece]():
        yield piece


def test_a_refusal_shows_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look like the beginning of a text; and an error in the middle of one begins a line."""

    @asynccontextmanager
    async def connect() -> AsyncIterator[Cluster]:
        yield Cluster(MemoryBroker().connect())

    async def refused(_cluster: Cluster, **_wanted: object) -> AsyncGenerator[Piece, None]:
        async for piece in _nothing():
            yield piece
        raise NotFound("no session 's'")

    async def broken(_cluster: Cluster, **_wanted: object) -> AsyncGenerator[Piece, None]:
        yield Piece("so ", 1, 1, 1, False, False, "", "")
        raise UserError("it broke")

    monkeypatch.setattr("dcnr.cli.generate.connect", connect)
    monkeypatch.setattr(Cluster, "pieces", refused)
    assert CliRunner().invoke(generate, ["s", "--prompt", "and "]).stdout == ""
    monkeypatch.setattr(Cluster, "pieces", broken)
    assert CliRunner().invoke(generate, ["s", "--prompt", "and "]).stdout == "and so \n"
