"""Which text is read, and how it streams: files, folders and globs become pieces of text that never hold a whole file.

Rule 1: text is UTF-8 and nothing about it is changed, neither newlines nor NUL nor a byte order mark. Invalid bytes are an error with
file and offset.
Rule 2: a piece ends where a blank follows a visible character or a newline follows a letter or digit. No byte-level pre-tokenizer
joins these two (GPT-2's, and those that take newlines to the punctuation before them), so the tokens of the pieces are the tokens of the
file. Only a run of `MAX_RUN` characters without such a place is cut anyway.
Rule 3: the order is fixed: sources as given, the files of a folder or glob sorted by path.
Rule 4: a file that is named is read, whatever it is; of those that a folder or glob turns up only UTF-8 text and Parquet is, and the rest
is counted.
"""

from __future__ import annotations

import codecs
import glob
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dcnr.errors import NotFound, UserError

PIECE_BYTES = 1 << 16
MAX_RUN = 1 << 20
"""Characters without a place to cut that are held at once: what bounds the memory that the longest line takes."""
PARQUET = ".parquet"
_WILDCARD = re.compile(r"[*?\[]")
_GIVE = "give text files, folders of them, or globs"
_UP_TO_LAST_CUT = re.compile(r"(?s:.*)(?:\S(?= )|[^\W_](?=\n))")
_NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The files of a text, and how many others lay beside them that are not UTF-8 text."""

    files: tuple[Path, ...]
    skipped: int


def find_files(sources: Sequence[str | os.PathLike[str]]) -> FoundFiles:
    """The files that `sources` (files, folders, globs) stand for, each once. Hidden files and `__pycache__` of folders do not count.

    Raises `UserError` naming the first source that has none.
    """
    found: list[Path] = []
    skipped: set[Path] = set()
    for source in sources:
        files, others = _files_of(os.fspath(source))
        if not files:
            which = "no files" if not others else f"no text among the {len(others)} files"
            raise UserError(f"{which} in '{source}'", _GIVE)
        found += files
        skipped.update(others)
    if not found:
        raise UserError("no text was given", _GIVE)
    return FoundFiles(distinct(found), len(skipped.difference(found)))


def distinct(files: Iterable[Path]) -> tuple[Path, ...]:
    """Each file once, under the first of its paths."""
    by_place: dict[Path, Path] = {}
    for file in files:
        by_place.setdefault(file.resolve(), file)
    return tuple(by_place.values())


def _files_of(source: str) -> tuple[list[Path], list[Path]]:
    """(those to read, those that are no text)."""
    path = Path(source)
    if path.is_dir():
        candidates = [file for file in sorted(path.rglob("*")) if file.is_file() and not _is_hidden(file.relative_to(path))]
    elif path.is_file():
        return [path], []
    elif path.exists():
        raise UserError(f"'{source}' is no file that can be read more than once", "write it to a file first")
    elif _WILDCARD.search(source):
        candidates = [Path(match) for match in sorted(glob.glob(source, recursive=True)) if os.path.isfile(match)]
    else:
        raise NotFound(f"'{source}' does not exist", _GIVE)
    text: list[Path] = []
    others: list[Path] = []
    for file in candidates:
        (text if file.suffix.lower() == PARQUET or _is_text(file) else others).append(file)
    return text, others


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in relative.parts)


def _is_text(file: Path) -> bool:
    try:
        for _ in _decode(file, PIECE_BYTES):
            pass
    except UserError:
        return False
    return True


def standard_library_files() -> list[Path]:
    """The running interpreter's own library source (about 12 MB of Python), without tests and installed packages, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    return [file for file in sorted(root.rglob("*.py")) if _NOT_LIBRARY.isdisjoint(file.relative_to(root).parts)]


def total_bytes(files: Iterable[Path]) -> int:
    """Size of all `files`."""
    return sum(file.stat().st_size for file in files)


def read_pieces(file: Path, piece_bytes: int = PIECE_BYTES, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """The text of `file` in pieces of about `piece_bytes` (more where it has no place to cut). Their sum is the file, or bytes `start`
    to `stop` of it.
    """
    yield from cut_pieces(_decode(file, piece_bytes, start, stop))


def cut_pieces(texts: Iterable[str]) -> Iterator[str]:
    """The same text, cut at other places: those of rule 2."""
    held: list[str] = []
    for text in texts:
        joint = held[-1][-1] + text if held else text
        match = _UP_TO_LAST_CUT.match(joint)
        if match is not None:
            cut = match.end() - (len(joint) - len(text))
            yield "".join(held) + text[:cut]
            held = [text[cut:]]
        elif sum(map(len, held)) + len(text) > MAX_RUN:
            yield "".join(held) + text
            held = []
        elif text:
            held.append(text)
    if any(held):
        yield "".join(held)


def _decode(file: Path, piece_bytes: int, start: int = 0, stop: int | None = None) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = start
    with file.open("rb") as stream:
        stream.seek(start)
        while True:
            data = stream.read(piece_bytes if stop is None else min(piece_bytes, stop - offset))
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise invalid_utf8(file, offset - pending + error.start) from error
            offset += len(data)
            if text:
                yield text
            if not data:
                return


def invalid_utf8(file: Path, at: int) -> UserError:
    """What is raised for it."""
    return UserError(f"{file}: invalid UTF-8 at byte {at}", "convert the file to UTF-8 or leave it out")
