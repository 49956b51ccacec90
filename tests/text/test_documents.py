"""Documents of all formats."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcnr.errors import UserError
from dcnr.text.documents import Piece, Reading, read_stretch, read_texts, stretches
from dcnr.text.preprocess import PIECE_BYTES, find_files

TEXTS = st.lists(st.text(alphabet="ab \n\t\r\0é😀\u0301", max_size=12), max_size=12)


def pieces_of(file: Path, reading: Reading, size: int, digests: bool = False, whole: bool = False) -> list[Piece]:
    """All pieces, in stretches of `size` bytes."""
    return [piece for stretch in stretches(file, reading, size, whole) for piece in read_stretch(stretch, reading, digests)]


def documents_of(pieces: list[Piece]) -> list[str]:
    """Their texts, joined up to where a document ends."""
    found, held = [], ""
    for piece in pieces:
        held += piece.text
        if piece.ends:
            found.append(held)
            held = ""
    assert held == ""
    return found


@settings(deadline=None)
@given(texts=TEXTS, size=st.integers(1, 40))
def test_lines_of_jsonl_are_documents(texts: list[str], size: int) -> None:
    """Whatever the stretches; blank lines and empty texts are none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.jsonl"
        file.write_text("\n\n".join(json.dumps({"n": 1, "body": text}, ensure_ascii=False) for text in texts))
        found = documents_of(pieces_of(file, Reading(field="body"), size))
    assert found == [text for text in texts if text]


@pytest.mark.parametrize("separator", ["<X>", "\n\n", "aba", "aa"])
@settings(deadline=None)
@given(texts=TEXTS, size=st.integers(1, 40))
def test_separators_are_between_documents(separator: str, texts: list[str], size: int) -> None:
    """The stretches cut no document, also where the separator overlaps itself: they are those of who reads from the beginning."""
    text = separator.join(texts)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.txt"
        file.write_bytes(text.encode())
        found = documents_of(pieces_of(file, Reading(separator=separator), size))
    assert found == [document for document in text.split(separator) if document]


def test_a_run_of_separators_costs_one_search(tmp_path: Path) -> None:
    """However many stretches might begin in it."""
    (tmp_path / "a.txt").write_bytes(b"\n" * 200_000 + b"a")
    cut = stretches(tmp_path / "a.txt", Reading(separator="\n\n"), 1)
    assert [(one.start, one.stop) for one in cut] == [(0, 2), (2, 200_001)]
    assert documents_of(list(read_stretch(cut[1], Reading(separator="\n\n")))) == ["a"]


@settings(deadline=None)
@given(text=st.text(alphabet="ab \n\t\ré😀", max_size=80), size=st.integers(1, 40))
def test_a_file_is_one_document_in_stretches_that_begin_before_a_blank(text: str, size: int) -> None:
    """It ends once, and its digest does not depend on the stretches."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.txt"
        file.write_bytes(text.encode())
        cut = stretches(file, Reading(), size)
        pieces = pieces_of(file, Reading(), size, digests=True)
        begins = [file.read_bytes()[one.start : one.start + 1] for one in cut[1:]]
    assert documents_of(pieces) == ([text] if text else [])
    assert len({piece.digest for piece in pieces}) <= 1
    assert set(begins) <= {b" ", b"\n"}


def test_rows_of_parquet_are_documents(tmp_path: Path) -> None:
    """Row groups are the stretches; a row without text is none; a folder's Parquet files are found."""
    file = tmp_path / "a.parquet"
    texts = ["one", None, "two\r\n😀", "", "three"]
    pq.write_table(pa.table({"text": texts, "n": [1, 2, 3, 4, 5]}), file, row_group_size=2)
    assert documents_of(pieces_of(file, Reading(), 1)) == ["one", "two\r\n😀", "three"]
    assert len(stretches(file, Reading(), 1)) == 3
    assert find_files([tmp_path]).files == (file,)
    file.rename(tmp_path / "B.PARQUET")
    assert find_files([tmp_path]).files == (tmp_path / "B.PARQUET",)
    assert len(pieces_of(tmp_path / "B.PARQUET", Reading(), 1)) == 3


def test_the_same_document_has_the_same_digest_in_every_format(tmp_path: Path) -> None:
    """So it stays in its split when a corpus is converted."""
    (tmp_path / "a.txt").write_text("the cat")
    (tmp_path / "b.txt").write_text("the cat|dog")
    (tmp_path / "c.jsonl").write_text('{"text": "the cat"}')
    pq.write_table(pa.table({"text": ["the cat"]}), tmp_path / "d.parquet")
    found = {pieces_of(file, Reading(separator="|"), 100, digests=True)[0].digest for file in sorted(tmp_path.iterdir())}
    found |= {pieces_of(tmp_path / "a.txt", Reading(), 100, digests=True)[0].digest}
    assert len(found) == 1


def test_a_long_document_comes_in_pieces(tmp_path: Path) -> None:
    """Of which only the last ends it."""
    text = "word " * PIECE_BYTES
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    pieces = pieces_of(tmp_path / "a.jsonl", Reading(), 10)
    assert len(pieces) >= 5
    assert documents_of(pieces) == [text]
    assert "".join(read_texts([tmp_path / "a.jsonl"], Reading())) == text


def test_the_format_may_be_told(tmp_path: Path) -> None:
    """Where the name does not say it, or says something else."""
    (tmp_path / "dump").write_text('{"text": "a"}')
    assert list(read_texts([tmp_path / "dump"], Reading("jsonl"))) == ["a"]
    assert "".join(read_texts([tmp_path / "dump"], Reading())) == '{"text": "a"}'


@pytest.mark.parametrize(
    ("name", "content", "reading", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', Reading(), r"a\.jsonl:3: not JSON"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"body": "b"}',
            Reading(),
            r"a\.jsonl:2: the line has no text in field 'text' \(say with --field of `dcnr dataset create`",
        ),
        ("a.jsonl", b'{"text": 5}', Reading(), r"a\.jsonl:1: the line has no text in field 'text'"),
        ("a.jsonl", b"[1]", Reading(), r"a\.jsonl:1: the line has no text in field 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}', Reading(), r"a\.jsonl:1: 'text' holds half a surrogate pair"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', Reading(), r"a\.jsonl: invalid UTF-8 at byte 24"),
        ("a.txt", b"ab|c\xff", Reading(separator="|"), r"a\.txt: invalid UTF-8 at byte 4"),
        ("a.parquet", b"PAR0", Reading(), r"a\.parquet is not a Parquet file"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, name: str, content: bytes, reading: Reading, message: str) -> None:
    """File and line, or file and byte."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        pieces_of(tmp_path / name, reading, 10)


def test_damage_in_parquet_is_told_with_its_row_group(tmp_path: Path) -> None:
    """Wherever it is: in the footer, in the head of a page, in a text; the row groups before it are read."""
    file = tmp_path / "a.parquet"
    texts = ["one", "two", "three", "four"]
    pq.write_table(pa.table({"text": texts}), file, row_group_size=2, use_dictionary=False, compression="none")
    good = file.read_bytes()
    file.write_bytes(good.replace(b"four", b"fo\xffr"))
    with pytest.raises(UserError, match=r"a\.parquet: row group 1 cannot be read: .*can't decode byte 0xff"):
        pieces_of(file, Reading(), 1)
    assert documents_of(list(read_stretch(stretches(file, Reading(), 1)[0], Reading()))) == ["one", "two"]
    head = pq.ParquetFile(file).metadata.row_group(1).column(0).data_page_offset
    file.write_bytes(good[:head] + b"\xff" + good[head + 1 :])
    with pytest.raises(UserError, match=r"a\.parquet: row group 1 cannot be read: "):
        pieces_of(file, Reading(), 1)
    file.write_bytes(good[:-40] + b"\xff" * 32 + good[-8:])
    with pytest.raises(UserError, match=r"a\.parquet is not a Parquet file: "):
        pieces_of(file, Reading(), 1)


def test_a_column_that_is_not_there_or_holds_no_text_is_named(tmp_path: Path) -> None:
    """With those that are."""
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), file)
    with pytest.raises(UserError, match=r"no column 'text' \(it has: body, n\)"):
        pieces_of(file, Reading(), 10)
    with pytest.raises(UserError, match="column 'n' holds int64, not text"):
        pieces_of(file, Reading(field="n"), 10)
