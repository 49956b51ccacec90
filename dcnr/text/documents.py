"""What is a document, and where a file may be cut for several readers.

A text file is one document, or several between separators; a line of JSONL and a row of Parquet are one each, of which one field is read.

Rule 1: a file's name says its format (`.jsonl`, `.ndjson`, `.parquet`; anything else is text), unless it is told.
Rule 2: stretches of a file may be read in any order and by anybody: together they give every document once, and the pieces of
`preprocess` of one that is longer than a stretch.
Rule 3: a document between separators, of a line or a row is held whole; of a file without them never more than a piece is.
Rule 4: an empty document is none.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from dcnr.errors import UserError
from dcnr.text.preprocess import PARQUET, PIECE_BYTES, cut_pieces, invalid_utf8, read_pieces

Format = Literal["text", "jsonl", "parquet"]
FORMATS: tuple[Format, ...] = get_args(Format)

_BY_SUFFIX: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", PARQUET: "parquet"}
_SAFE_CUT = re.compile(rb"[A-Za-z0-9](?=[ \n])")
_ROWS_AT_ONCE = 256
_DIGEST = partial(hashlib.blake2b, digest_size=16)
_SAY_WHERE = "say with --field of `dcnr dataset create` where the text is, or leave the file out"


@dataclass(frozen=True, slots=True)
class Reading:
    """How files are read: in which format (None: as the name says), which field of a line or row, and what separates documents of text."""

    format: Format | None = None
    field: str = "text"
    separator: str | None = None

    def of(self, file: Path) -> Format:
        """The format of one file."""
        return self.format or _BY_SUFFIX.get(file.suffix.lower(), "text")


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a file: bytes `start` to below `stop`, or such row groups of Parquet. `bytes`: how much work it is."""

    file: Path
    start: int
    stop: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Text to encode by itself. `ends`: a document ends with it. `digest` of its document, where that was asked for."""

    text: str
    ends: bool
    digest: bytes = b""


def digest_of(data: bytes) -> bytes:
    """What a document or name is known by."""
    return _DIGEST(data).digest()


def stretches(file: Path, reading: Reading, size: int, whole: bool = False) -> list[Stretch]:
    """`file`, cut into stretches of about `size` bytes; `whole`: no document may be cut."""
    kind = reading.of(file)
    if kind == "parquet":
        return _row_groups(file)
    total = file.stat().st_size
    if total == 0 or (whole and kind == "text" and reading.separator is None):
        return [Stretch(file, 0, total, total)]
    cut = _cutter(kind, reading)
    ends = [0]
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for at in range(size, total, size):
            if at >= ends[-1]:  # else it would be found again, however far away it is
                ends.append(cut(data, at))
    if ends[-1] < total:
        ends.append(total)
    return [Stretch(file, start, stop, stop - start) for start, stop in pairwise(ends)]


def read_stretch(stretch: Stretch, reading: Reading, digests: bool = False) -> Iterator[Piece]:
    """Its text, piece by piece."""
    match reading.of(stretch.file):
        case "jsonl":
            yield from _documents(_json_fields(stretch, reading.field), digests)
        case "parquet":
            yield from _documents(_parquet_fields(stretch, reading.field), digests)
        case "text" if reading.separator is None:
            yield from _text_file(stretch, digests)
        case "text":
            yield from _documents(_between(stretch, (reading.separator or "").encode()), digests)


def read_texts(files: Sequence[Path], reading: Reading, size: int = 1 << 28) -> Iterator[str]:
    """The text of all files, piece by piece, in order."""
    for file in files:
        for stretch in stretches(file, reading, size):
            yield from (piece.text for piece in read_stretch(stretch, reading))


def _cutter(kind: Format, reading: Reading) -> Callable[[mmap.mmap, int], int]:
    """Where, from a byte on, the next stretch may begin."""
    if kind == "text" and reading.separator is None:

        def cut(data: mmap.mmap, at: int) -> int:
            found = _SAFE_CUT.search(data, at)
            return found.end() if found else len(data)

        return cut
    mark = b"\n" if reading.separator is None or kind == "jsonl" else reading.separator.encode()

    def after_mark(data: mmap.mmap, at: int) -> int:
        """Behind a mark that no other one overlaps from the left, so that who reads from the beginning finds it too."""
        found = data.find(mark, max(at - len(mark) + 1, 0))
        while data.rfind(mark, max(found - len(mark) + 1, 0), max(found + len(mark) - 1, 0)) >= 0:
            found = data.find(mark, found + len(mark))
        return found + len(mark) if found >= 0 else len(data)

    return after_mark


def _text_file(stretch: Stretch, digests: bool) -> Iterator[Piece]:
    digest = b""
    if digests:
        with stretch.file.open("rb") as stream:
            digest = hashlib.file_digest(stream, _DIGEST).digest()
    ends = stretch.stop == stretch.file.stat().st_size
    before: str | None = None
    for text in read_pieces(stretch.file, PIECE_BYTES, stretch.start, stretch.stop):
        if before is not None:
            yield Piece(before, False, digest)
        before = text
    if before is not None:
        yield Piece(before, ends, digest)


def _documents(texts: Iterator[str], digests: bool) -> Iterator[Piece]:
    for text in texts:
        digest = digest_of(text.encode()) if digests else b""
        if len(text) <= PIECE_BYTES:
            if text:
                yield Piece(text, True, digest)
            continue
        *some, last = cut_pieces(text[at : at + PIECE_BYTES] for at in range(0, len(text), PIECE_BYTES))
        yield from (Piece(piece, False, digest) for piece in some)
        yield Piece(last, True, digest)


def _between(stretch: Stretch, separator: bytes) -> Iterator[str]:
    """What stands between the separators; where it is not UTF-8, file and byte are told."""
    for at, data in _cut_bytes(stretch, separator):
        try:
            yield data.decode()
        except UnicodeDecodeError as error:
            raise invalid_utf8(stretch.file, at + error.start) from error


def _cut_bytes(stretch: Stretch, separator: bytes) -> Iterator[tuple[int, bytes]]:
    """(where it begins, what stands) between the separators."""
    if stretch.start == stretch.stop:
        return
    with stretch.file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = stretch.start
        while at < stretch.stop:
            found = data.find(separator, at, stretch.stop)
            end = found if found >= 0 else stretch.stop
            yield at, data[at:end]
            at = end + len(separator)


def _json_fields(stretch: Stretch, field: str) -> Iterator[str]:
    for at, line in _cut_bytes(stretch, b"\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row[field]
            if not isinstance(text, str):
                raise TypeError(f"'{field}' is no text")
            text.encode()
        except UnicodeDecodeError as error:
            raise invalid_utf8(stretch.file, at + error.start) from error
        except (ValueError, KeyError, TypeError) as error:
            raise _bad_line(stretch.file, at, field, error) from error
        yield text


def _bad_line(file: Path, at: int, field: str, error: Exception) -> UserError:
    with file.open("rb") as stream:
        number, left = 1, at
        while left:
            block = stream.read(min(left, 1 << 20))
            number, left = number + block.count(b"\n"), left - len(block)
    where = f"{file}:{number}"
    match error:
        case json.JSONDecodeError():
            return UserError(f"{where}: not JSON: {error}", "every line of JSONL is one JSON object")
        case UnicodeEncodeError():
            return UserError(f"{where}: '{field}' holds half a surrogate pair", "give valid Unicode text")
        case _:
            return UserError(f"{where}: the line has no text in field '{field}'", _SAY_WHERE)


def _row_groups(file: Path) -> list[Stretch]:
    with _opened(file) as parquet:
        sizes = [parquet.metadata.row_group(group).total_byte_size for group in range(parquet.num_row_groups)]
    return [Stretch(file, group, group + 1, size) for group, size in enumerate(sizes)]


def _parquet_fields(stretch: Stretch, field: str) -> Iterator[str]:
    with _opened(stretch.file) as parquet:
        names = parquet.schema_arrow.names
        if field not in names:
            raise UserError(f"{stretch.file} has no column '{field}' (it has: {', '.join(names)})", _SAY_WHERE)
        kind = str(parquet.schema_arrow.field(field).type)
        if kind not in {"string", "large_string", "string_view"}:
            raise UserError(f"{stretch.file}: column '{field}' holds {kind}, not text", _SAY_WHERE)
        for group in range(stretch.start, stretch.stop):
            with _damage_told(f"{stretch.file}: row group {group} cannot be read"):
                for rows in parquet.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=[group], columns=[field], use_threads=False):
                    yield from filter(None, rows.column(0).to_pylist())


def _opened(file: Path) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(f"{file}: reading Parquet needs pyarrow", "pip install 'dcnr[parquet]'") from error
    with _damage_told(f"{file} is not a Parquet file"):
        return ParquetFile(file, memory_map=True)


@contextmanager
def _damage_told(what: str) -> Iterator[None]:
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the system's, and not the library's
            raise
        raise UserError(f"{what}: {error}", "write it again, or leave it out") from error
