"""Datasets of ids that are there already."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dcnr.data import derive
from dcnr.data.create import Recipe, create_dataset
from dcnr.data.dataset import Dataset
from dcnr.data.derive import derive_dataset, import_ids
from dcnr.data.manifest import DatasetManifest, dataset_folder
from dcnr.data.split import SplitRule
from dcnr.data.transfer import push_dataset
from dcnr.errors import UserError
from dcnr.storage.file import FileStorage
from dcnr.text.tokenizer import Tokenizer, add_tokenizer, delete_tokenizer, no_progress, open_tokenizer
from tests.data.texts import ids_of, make_tokenizer, text_of


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A dataset `d` of 2,000 words."""
    make_tokenizer(tmp_path)
    (tmp_path / "text").write_bytes(text_of(2000).encode())
    create_dataset(tmp_path, "d", [tmp_path / "text"], "b", Recipe(8))
    return tmp_path


def all_ids(data_dir: Path, manifest: DatasetManifest) -> list[int]:
    """Training before validation."""
    return [*ids_of(data_dir, manifest, "train").tolist(), *ids_of(data_dir, manifest, "validation").tolist()]


def test_a_dataset_is_cut_anew_without_its_text(data_dir: Path) -> None:
    """The same tokens, another share; it knows whom it comes from."""
    (data_dir / "text").unlink()
    parent = Dataset.open(data_dir, "d").manifest
    made = derive_dataset(Dataset.open(data_dir, "d"), "half", SplitRule(validation=0.5), seq_len=4)
    assert all_ids(data_dir, made) == all_ids(data_dir, parent)
    assert (made.parent, made.seq_len, made.bytes, made.documents) == ("d", 4, parent.bytes, 1)
    assert made.validation_tokens == -(-len(all_ids(data_dir, parent)) // 2)


def test_only_the_first_tokens(data_dir: Path) -> None:
    """For a quick try."""
    made = derive_dataset(Dataset.open(data_dir, "d"), "small", SplitRule(), tokens=100)
    assert all_ids(data_dir, made) == all_ids(data_dir, Dataset.open(data_dir, "d").manifest)[:100]
    assert made.documents == 0


def test_folds_of_tokens_are_everything_once(data_dir: Path) -> None:
    """Every block is for validation in one fold."""
    folds = [derive_dataset(Dataset.open(data_dir, "d"), f"f{fold}", SplitRule("kfold", folds=3, fold=fold)) for fold in range(3)]
    found = [token for fold in folds for token in ids_of(data_dir, fold, "validation").tolist()]
    assert sorted(found) == sorted(all_ids(data_dir, Dataset.open(data_dir, "d").manifest))
    assert folds[1].strategy == "kfold, 1 of 3 of blocks, seed 0"


def test_who_was_interrupted_can_begin_again(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is in the way, neither of a derived dataset nor of an imported one."""
    raw = dataset_folder(data_dir, "d") / "train-00000.bin"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    makers: list[Callable[[], DatasetManifest]] = [
        lambda: derive_dataset(Dataset.open(data_dir, "d"), "x", SplitRule()),
        lambda: import_ids(data_dir, "y", {"train": [raw]}, "b", 8),
    ]
    for make in makers:
        with monkeypatch.context() as patched:
            patched.setattr(derive, "finish", interrupted)
            with pytest.raises(KeyboardInterrupt):
                make()
        assert make().train_tokens


def test_what_cannot_be_derived_is_refused(data_dir: Path) -> None:
    """In words; nothing is left."""
    with pytest.raises(UserError, match="tokens cannot be split by documents"):
        derive_dataset(Dataset.open(data_dir, "d"), "x", SplitRule("documents"))
    with pytest.raises(UserError, match="the train split has 4 tokens"):
        derive_dataset(Dataset.open(data_dir, "d"), "x", SplitRule(validation=0), tokens=4)
    assert [path.name for path in (data_dir / "datasets").iterdir()] == ["d"]


def test_a_tokenizer_that_was_replaced_derives_nothing(data_dir: Path) -> None:
    """It would count other bytes, and other ids would be known to it."""
    delete_tokenizer(data_dir, "b")
    (data_dir / "learn").write_text("another text")
    add_tokenizer(data_dir, "b", Tokenizer.train([data_dir / "learn"], "bpe", 300))
    with pytest.raises(UserError, match="tokenizer 'b' is not the one that made dataset 'd'"):
        derive_dataset(Dataset.open(data_dir, "d"), "x", SplitRule())


def test_what_is_in_a_storage_is_fetched_to_derive_from_it(data_dir: Path) -> None:
    """Shards that are not here, of a dataset that may not be here either."""
    storage = FileStorage(data_dir / "storage")
    asyncio.run(push_dataset(data_dir, "d", storage, no_progress))
    made = derive_dataset(Dataset.open(data_dir / "there", "d", storage), "half", SplitRule(validation=0.5))
    assert all_ids(data_dir / "there", made) == all_ids(data_dir, Dataset.open(data_dir, "d").manifest)


def test_shards_of_nanogpt_are_read_as_they_are(data_dir: Path) -> None:
    """Several of them, in order; the tokenizer says how many bytes they stand for."""
    ids = np.array(open_tokenizer(data_dir, "b").encode(text_of(300)), dtype="<u2")
    for name, part in (("0.bin", ids[:200]), ("1.bin", ids[200:500]), ("val.bin", ids[500:])):
        part.tofile(data_dir / name)
    (data_dir / "none.bin").touch()
    made = import_ids(
        data_dir,
        "i",
        {"train": [data_dir / "0.bin", data_dir / "none.bin", data_dir / "1.bin"], "validation": [data_dir / "val.bin"]},
        "b",
        8,
    )
    assert all_ids(data_dir, made) == ids.tolist()
    assert (made.train_tokens, made.bytes, made.files) == (500, len(text_of(300).encode()), 4)
    assert Dataset.open(data_dir, "i").text("train", 0, 500) + Dataset.open(data_dir, "i").text("validation", 0, 10**6) == text_of(300)


def test_shards_that_are_not_of_the_tokenizer_are_refused(data_dir: Path) -> None:
    """An id behind its vocabulary, half an id, too few."""
    np.array([1, 2, 300] * 20, dtype="<u2").tofile(data_dir / "wrong.bin")
    (data_dir / "odd.bin").write_bytes(b"abc")
    np.arange(8, dtype="<u2").tofile(data_dir / "short.bin")
    for file, message in (
        ("wrong.bin", "token 2 of the train split has id 300, the tokenizer's last is 2"),
        ("odd.bin", r"odd\.bin has 3 bytes, which are no whole ids of 2 bytes"),
        ("short.bin", "train split has 8 tokens"),
    ):
        with pytest.raises(UserError, match=message):
            import_ids(data_dir, "i", {"train": [data_dir / file]}, "b", 8)
    assert [path.name for path in (data_dir / "datasets").iterdir()] == ["d"]
