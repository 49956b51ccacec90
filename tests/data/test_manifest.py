"""What is believed of a manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dcnr.data.create import Recipe, create_dataset
from dcnr.data.manifest import decode_manifest, delete_dataset, dtype_for, encode_manifest, has_dataset, unfinished_folder
from dcnr.errors import NotFound, UserError
from tests.data.texts import make_tokenizer, text_of


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1, "uint16"), (1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_ids_are_stored_as_small_as_the_vocabulary_allows(vocab_size: int, dtype: str) -> None:
    """The largest id is one less than the vocabulary's size."""
    assert dtype_for(vocab_size) == dtype


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "e"}, "it is not the manifest of dataset 'd'"),
        ({"splits": {}}, "it is not the manifest of dataset 'd'"),
        ({"shards": []}, "the shards do not hold the train tokens"),
        ({"dtype": "int8"}, "is damaged"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_damaged(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """It is told where it is."""
    make_tokenizer(tmp_path)
    (tmp_path / "text").write_text(text_of(200))
    made = create_dataset(tmp_path, "d", [tmp_path / "text"], "b", Recipe(8))
    assert decode_manifest(encode_manifest(made), "d", "here") == made
    fields = json.loads(encode_manifest(made)) | change
    with pytest.raises(UserError, match=f"here.*{message}"):
        decode_manifest(json.dumps(fields).encode(), "d", "here")


def test_what_was_never_finished_can_be_deleted(tmp_path: Path) -> None:
    """It is no dataset."""
    unfinished_folder(tmp_path, "d").mkdir(parents=True)
    assert not has_dataset(tmp_path, "d")
    delete_dataset(tmp_path, "d")
    assert not unfinished_folder(tmp_path, "d").exists()
    with pytest.raises(NotFound):
        delete_dataset(tmp_path, "d")
