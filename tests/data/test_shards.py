"""Tokens over several files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcnr.data import shards
from dcnr.data.manifest import Contents, Ids, Shard
from dcnr.data.shards import TokenStream, blocks, map_ids, write_shards
from dcnr.errors import UserError

U2 = np.dtype("<u2")


def stream_of(sizes: list[int]) -> TokenStream:
    """Tokens 0, 1, 2, … in shards of these sizes."""
    parts: dict[str, Ids] = {}
    start = 0
    for number, size in enumerate(sizes):
        parts[str(number)] = np.arange(start, start + size, dtype=U2)
        start += size
    return TokenStream([Shard(name, "train", len(ids), "") for name, ids in parts.items()], lambda shard: parts[shard.file])


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), data=st.data())
def test_borders_of_shards_are_invisible(sizes: list[int], data: st.DataObject) -> None:
    """Any stretch of the stream is what one array would give."""
    stream = stream_of(sizes)
    start = data.draw(st.integers(0, sum(sizes) - 1))
    stop = data.draw(st.integers(start + 1, sum(sizes)))
    assert len(stream) == sum(sizes)
    assert stream.read(start, stop).tolist() == list(range(start, stop))


def test_no_shard_is_no_token() -> None:
    """As a split without text has."""
    assert len(TokenStream([], lambda _: np.empty(0, U2))) == 0


def test_what_is_written_is_cut_into_shards_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are those of the tokens' text; a split that got nothing has no file."""
    monkeypatch.setattr(shards, "SHARD_TOKENS", 10)
    monkeypatch.setattr(shards, "BLOCK_TOKENS", 4)
    found = blocks(stream_of([7, 20]), [(0, 25, "train")])
    written, splits = write_shards(tmp_path / "final", found, U2, np.arange(30))
    assert [(one.file, one.tokens) for one in written] == [("train-00000.bin", 10), ("train-00001.bin", 10), ("train-00002.bin", 5)]
    assert np.concatenate([map_ids(tmp_path / "final" / one.file, U2) for one in written]).tolist() == list(range(25))
    assert splits == {"train": Contents(25, sum(range(25))), "validation": Contents(0, 0)}
    assert len(list((tmp_path / "final").iterdir())) == 3


def test_an_id_behind_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    """Before anything could be trained on it."""
    with pytest.raises(UserError, match="token 5 of the train split has id 9, the tokenizer's last is 7"):
        write_shards(tmp_path / "final", [("train", np.array([1, 2, 3, 4, 5, 9, 8], U2))], U2, np.ones(8, np.int64))
