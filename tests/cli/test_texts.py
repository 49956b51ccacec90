"""What the commands that read text share."""

from __future__ import annotations

import io
import os
import sys
import threading
from pathlib import Path

import pytest

from dcnr.cli.texts import reading_of, with_stdin
from dcnr.text.documents import Reading


def test_newlines_and_tabs_of_a_separator_are_written_as_escapes() -> None:
    """As a shell passes them on."""
    assert reading_of("text", "text", r"\n---\t") == Reading("text", "text", "\n---\t")
    assert reading_of(None, "body", None) == Reading(None, "body", None)


def test_stdin_is_a_file_as_long_as_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte, between the other sources; it is gone afterwards."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\r\n\0b\xff")))
    with with_stdin(("x.txt", "-")) as (first, spooled):
        assert first == "x.txt"
        assert Path(spooled).read_bytes() == b"a\r\n\0b\xff"
    assert not Path(spooled).exists()
    with with_stdin(("x.txt",)) as paths:
        assert paths == ("x.txt",)


def test_a_pipe_is_a_file_as_long_as_it_is_read(tmp_path: Path) -> None:
    """As a shell's `<(zcat …)` gives one."""
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"from a pipe",))
    writer.start()
    with with_stdin((str(tmp_path / "pipe"),)) as (spooled,):
        assert Path(spooled).read_bytes() == Path(spooled).read_bytes() == b"from a pipe"
    writer.join()
    assert not Path(spooled).exists()
