"""A text becomes tokenizer and dataset once, whole or not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dcnr.cli.corpus import prepare_text
from dcnr.cli.source import read_source
from dcnr.data.dataset import Dataset
from dcnr.data.manifest import list_datasets, read_manifest
from dcnr.errors import UserError
from dcnr.ids import NetworkId
from dcnr.network.graph import Graph
from dcnr.text.tokenizer import list_tokenizers
from tests.cli.conftest import NETWORKS, TINY


@pytest.fixture(scope="module")
def tiny() -> Graph:
    """The demo's network."""
    return read_source(TINY).graph


async def test_the_same_text_is_prepared_once(tiny: Graph, book: Path, tmp_path: Path) -> None:
    """A second run, under another file name, finds the first one's work."""
    data_dir = tmp_path / "data"
    name = await prepare_text(data_dir, [str(book)], tiny)
    stamp = (data_dir / "datasets" / name / "train-00000.bin").stat().st_mtime_ns
    copy = tmp_path / "copy.txt"
    copy.write_bytes(book.read_bytes())
    assert await prepare_text(data_dir, [str(copy)], tiny) == name
    assert (data_dir / "datasets" / name / "train-00000.bin").stat().st_mtime_ns == stamp
    copy.write_text(book.read_text() + "more")
    assert await prepare_text(data_dir, [str(copy)], tiny) != name


async def test_how_a_text_is_read_is_a_part_of_what_it_is(tiny: Graph, tmp_path: Path) -> None:
    """The same bytes as text and as lines of JSON are two texts."""
    lines = "".join(f'{{"text": "line {i} of a book"}}\n' for i in range(300))
    names = []
    for file in ("a.txt", "a.jsonl"):
        (tmp_path / file).write_text(lines)
        names.append(await prepare_text(tmp_path / "data", [str(tmp_path / file)], tiny))
    assert names[0] != names[1]
    assert [read_manifest(tmp_path / "data", name).documents for name in names] == [1, 300]


async def test_a_character_network_reads_characters(book: Path, tmp_path: Path) -> None:
    """A vocabulary of at most 256 means characters."""
    graph = read_source(str(NETWORKS / "shakespeare_char.yml")).graph
    dataset = Dataset.open(tmp_path, await prepare_text(tmp_path, [str(book)], graph))
    assert dataset.tokenizer().kind == "char"


@pytest.mark.parametrize("content", ["", "too short"])
async def test_what_is_too_short_leaves_nothing(content: str, tiny: Graph, tmp_path: Path) -> None:
    """Neither the dataset nor the tokenizer that was made for it."""
    (tmp_path / "book.txt").write_text(content)
    with pytest.raises(UserError):
        await prepare_text(tmp_path, [str(tmp_path / "book.txt")], tiny)
    assert (list_tokenizers(tmp_path), list_datasets(tmp_path)) == ([], {})


async def test_a_network_without_embedder_reads_no_text(book: Path, tmp_path: Path) -> None:
    """It is said."""
    with pytest.raises(UserError, match="cannot read text"):
        await prepare_text(tmp_path, [str(book)], Graph(NetworkId("empty"), ()))


async def test_a_folder_is_read_and_what_is_no_text_is_told(
    tiny: Graph, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dataset knows where it came from."""
    (book.parent / "picture.png").write_bytes(b"\x89PNG")
    name = await prepare_text(tmp_path / ".data", [str(book.parent)], tiny)
    assert capsys.readouterr().err == "skipped 1 file that is not UTF-8 text\n"
    manifest = read_manifest(tmp_path / ".data", name)
    assert (manifest.sources, manifest.files, manifest.skipped) == ((str(book.parent),), 1, 1)


async def test_a_cancelled_text_leaves_nothing(tiny: Graph, book: Path, tmp_path: Path) -> None:
    """Wherever it was: the tokenizer without its dataset goes too."""
    data_dir = tmp_path / "data"
    working = asyncio.ensure_future(prepare_text(data_dir, [str(book)], tiny))
    while not list_tokenizers(data_dir):
        await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert (list_tokenizers(data_dir), list_datasets(data_dir)) == ([], {})
    assert not list(data_dir.rglob("*.bin"))
