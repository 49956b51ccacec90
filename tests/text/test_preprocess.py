"""Finding and streaming text."""

from __future__ import annotations

import os
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcnr.errors import NotFound, UserError
from dcnr.text.preprocess import FoundFiles, find_files, read_pieces, standard_library_files, total_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """b.txt, a.txt, sub/c.md, a hidden file and a compiled module."""
    (tmp_path / "sub/__pycache__").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "sub/c.md", ".hidden", "sub/__pycache__/c.pyc"):
        (tmp_path / name).write_text(name)
    return tmp_path


def test_a_folder_gives_its_visible_files_sorted(folder: Path) -> None:
    """Hidden files and `__pycache__` stay out, and do not count as skipped; sub-folders are read."""
    assert find_files([folder]) == FoundFiles((folder / "a.txt", folder / "b.txt", folder / "sub/c.md"), skipped=0)


@pytest.mark.parametrize("source", [".", "sub", "**/*"])
def test_what_a_folder_or_glob_holds_beside_text_is_skipped_and_counted(folder: Path, source: str) -> None:
    """However late in the file its first invalid byte is."""
    (folder / "sub/late.txt").write_bytes(b"x" * 70_000 + b"\xff")
    (folder / "sub/picture.png").write_bytes(b"\x89PNG")
    found = find_files([str(folder / source)])
    assert found.files[-1] == folder / "sub/c.md"
    assert found.skipped == 2


def test_a_named_file_is_read_whatever_it_is(folder: Path) -> None:
    """So that its error is seen, also where a folder that was named too would skip it."""
    bad = folder / "bad.txt"
    bad.write_bytes(b"\xff")
    assert find_files([folder, bad]) == FoundFiles((folder / "a.txt", folder / "b.txt", folder / "sub/c.md", bad), skipped=0)


def test_a_pipe_is_no_file(folder: Path) -> None:
    """Text is read more than once; of a pipe nothing would be there the second time."""
    os.mkfifo(folder / "pipe")
    with pytest.raises(UserError, match=r"pipe' is no file that can be read more than once"):
        find_files([folder / "pipe"])


def test_a_folder_without_text_is_an_error(tmp_path: Path) -> None:
    """That says what is there instead."""
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    with pytest.raises(UserError, match="no text among the 1 files in"):
        find_files([tmp_path])


def test_sources_keep_their_order_and_count_once(folder: Path) -> None:
    """A file that a later source names again, by whatever path, is not read twice."""
    (folder / "link.txt").symlink_to(folder / "b.txt")
    assert find_files([folder / "b.txt", folder / "sub/../b.txt", folder / "link.txt"]).files == (folder / "b.txt",)
    (folder / "link.txt").unlink()
    assert find_files([folder / "b.txt", folder / "*.txt"]).files == (folder / "b.txt", folder / "a.txt")


def test_a_glob_may_cross_folders(folder: Path) -> None:
    """`**` matches any depth."""
    assert find_files([str(folder / "**/*.md")]).files == (folder / "sub/c.md",)


def test_a_file_whose_name_looks_like_a_glob_is_a_file(tmp_path: Path) -> None:
    """What exists is meant literally."""
    odd = tmp_path / "a[1].txt"
    odd.write_text("x")
    assert find_files([odd]).files == (odd,)


def test_what_does_not_exist_is_named(tmp_path: Path) -> None:
    """A missing file, a glob without match, an empty folder and no source at all are four clear errors."""
    with pytest.raises(NotFound, match=r"missing\.txt' does not exist"):
        find_files([tmp_path / "missing.txt"])
    with pytest.raises(UserError, match="no files in"):
        find_files([tmp_path / "*.txt"])
    with pytest.raises(UserError, match="no files in"):
        find_files([tmp_path])
    with pytest.raises(UserError, match="no text was given"):
        find_files([])


@settings(deadline=None)
@given(text=st.text(alphabet="ab \n\t\r\0é😀\u0301\ufeff", max_size=60), size=st.integers(1, 9))
def test_pieces_are_the_file_and_end_before_a_blank(text: str, size: int) -> None:
    """Nothing is lost or changed at any piece size, also inside a character; cuts are where no pre-tokenizer joins."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text"
        file.write_bytes(text.encode())
        pieces = list(read_pieces(file, size))
    assert "".join(pieces) == text
    for left, right in pairwise(pieces):
        assert not left[-1].isspace()
        assert right[0] in " \n"


@pytest.mark.parametrize("before", [0, 3, 65536, 70001])
@pytest.mark.parametrize("bad", [b"\xff", b"\xc3(", b"\xe2\x82"])
def test_invalid_utf8_is_reported_with_file_and_offset(tmp_path: Path, before: int, bad: bytes) -> None:
    """Wherever it stands, also cut off at the end of the file."""
    file = tmp_path / "broken.txt"
    file.write_bytes(b"x" * before + bad)
    with pytest.raises(UserError, match=rf"broken\.txt: invalid UTF-8 at byte {before} "):
        list(read_pieces(file))


def test_the_offset_counts_bytes_of_a_character_split_between_reads(tmp_path: Path) -> None:
    """A character that began in one read and turns out invalid in the next is reported where it began."""
    file = tmp_path / "broken.txt"
    file.write_bytes(b"abc\xe2\x82(")
    with pytest.raises(UserError, match="at byte 3 "):
        list(read_pieces(file, 4))


def test_the_standard_library_is_real_text_without_tests() -> None:
    """Every machine has megabytes of it; sorted, so that everyone reads the same order."""
    files = standard_library_files()
    assert files == sorted(files)
    assert total_bytes(files) > 1_000_000
    assert {"dataclasses.py", "argparse.py"} <= {file.name for file in files}
    assert not any("test" in file.parts or "site-packages" in file.parts for file in files)
