"""A text becomes tokenizer and dataset once, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcnr.cli.corpus import prepare_text
from dcnr.cli.source import read_source
from dcnr.data.dataset import Dataset, list_datasets
from dcnr.errors import UserError
from dcnr.ids import NetworkId
from dcnr.network.graph import Graph
from dcnr.text.tokenizer import list_tokenizers
from tests.cli.conftest import NETWORKS, TINY


@pytest.fixture(scope="module")
def tiny() -> Graph:
    """The demo's network."""
    return read_source(TINY).graph


def test_the_same_text_is_prepared_once(tiny: Graph, book: Path, tmp_path: Path) -> None:
    """A second run, under another file name, finds the first one's work."""
    data_dir = tmp_path / "data"
    name = prepare_text(data_dir, [book], tiny)
    stamp = (data_dir / "datasets" / name / "train.bin").stat().st_mtime_ns
    copy = tmp_path / "copy.txt"
    copy.write_bytes(book.read_bytes())
    assert prepare_text(data_dir, [copy], tiny) == name
    assert (data_dir / "datasets" / name / "train.bin").stat().st_mtime_ns == stamp
    copy.write_text(book.read_text() + "more")
    assert prepare_text(data_dir, [copy], tiny) != name


def test_a_character_network_reads_characters(book: Path, tmp_path: Path) -> None:
    """A vocabulary of at most 256 means characters."""
    graph = read_source(str(NETWORKS / "shakespeare_char.yml")).graph
    dataset = Dataset.open(tmp_path, prepare_text(tmp_path, [book], graph))
    assert dataset.tokenizer().kind == "char"


@pytest.mark.parametrize("content", ["", "too short"])
def test_what_is_too_short_leaves_nothing(content: str, tiny: Graph, tmp_path: Path) -> None:
    """Neither the dataset nor the tokenizer that was made for it."""
    (tmp_path / "book.txt").write_text(content)
    with pytest.raises(UserError):
        prepare_text(tmp_path, [tmp_path / "book.txt"], tiny)
    assert (list_tokenizers(tmp_path), list_datasets(tmp_path)) == ([], [])


def test_a_network_without_embedder_reads_no_text(book: Path, tmp_path: Path) -> None:
    """It is said."""
    with pytest.raises(UserError, match="cannot read text"):
        prepare_text(tmp_path, [book], Graph(NetworkId("empty"), ()))
