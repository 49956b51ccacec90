"""Datasets in a storage."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dcnr.data import shards
from dcnr.data.create import Recipe, create_dataset
from dcnr.data.dataset import Dataset
from dcnr.data.manifest import dataset_folder, delete_dataset
from dcnr.data.transfer import push_dataset
from dcnr.errors import AlreadyExists, NotFound, PeerError, UserError
from dcnr.storage.base import Storage
from dcnr.storage.file import FileStorage
from dcnr.text.tokenizer import Tokenizer, add_tokenizer, delete_tokenizer, no_progress
from tests.data.texts import make_tokenizer, text_of


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data directory with a dataset `d` of several shards."""
    monkeypatch.setattr(shards, "SHARD_TOKENS", 500)
    make_tokenizer(tmp_path / "here")
    (tmp_path / "text").write_bytes(text_of(1000).encode())
    create_dataset(tmp_path / "here", "d", [tmp_path / "text"], "b", Recipe(8))
    return tmp_path / "here"


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """Somewhere else."""
    return FileStorage(tmp_path / "storage")


def push(data_dir: Path, storage: Storage) -> None:
    """Dataset `d`."""
    asyncio.run(push_dataset(data_dir, "d", storage, no_progress))


def test_a_pushed_dataset_is_read_on_another_machine(here: Path, storage: Storage, tmp_path: Path) -> None:
    """The same batches and text; what it fetches it keeps, and only what it reads."""
    push(here, storage)
    there = tmp_path / "there"
    with pytest.raises(NotFound, match="no dataset 'd'"):
        Dataset.open(there, "d")
    opened, original = Dataset.open(there, "d", storage), Dataset.open(here, "d")
    assert opened.text("train", 0, 10) == original.text("train", 0, 10)
    assert [path.name for path in opened.folder.glob("*.bin")] == ["train-00000.bin"]
    assert (opened.batch("train", 1, 1, 300, 8) == original.batch("train", 1, 1, 300, 8)).all()
    assert opened.problems() == []
    delete_dataset(here, "d")
    assert Dataset.open(there, "d").manifest == original.manifest


def test_pushing_again_changes_nothing_and_another_of_the_name_is_refused(here: Path, storage: Storage) -> None:
    """What is there is what others train on."""
    push(here, storage)
    before = asyncio.run(storage.sizes("datasets/"))
    push(here, storage)
    assert asyncio.run(storage.sizes("datasets/")) == before
    delete_dataset(here, "d")
    create_dataset(here, "d", [here.parent / "text"], "b", Recipe(4))
    with pytest.raises(AlreadyExists, match="another dataset 'd'"):
        push(here, storage)


def test_what_is_only_partly_here_is_not_pushed_on(here: Path, storage: Storage, tmp_path: Path) -> None:
    """It says how to get the rest; a dataset that is fetched whole goes on."""
    push(here, storage)
    another, there = FileStorage(tmp_path / "another"), tmp_path / "there"
    opened = Dataset.open(there, "d", storage)
    with pytest.raises(UserError, match=r"train-00000\.bin is missing .*`dcnr dataset verify d` fetches"):
        push(there, another)
    assert opened.problems() == []
    push(there, another)
    assert asyncio.run(another.sizes("")) == asyncio.run(storage.sizes(""))


def test_the_data_directory_is_no_other_place(here: Path, tmp_path: Path) -> None:
    """By default it is the storage: nothing is pushed there, and what is not there is not there."""
    with pytest.raises(UserError, match="is the data directory itself"):
        push(here, FileStorage(here))
    nothing = tmp_path / "nothing"
    with pytest.raises(NotFound, match=r"no dataset 'd' in .*nothing \("):
        Dataset.open(nothing, "d", FileStorage(nothing))


def test_another_tokenizer_of_the_same_name_is_not_taken_for_that_of_the_dataset(here: Path, storage: Storage, tmp_path: Path) -> None:
    """Neither replaced nor used; without it the dataset comes."""
    push(here, storage)
    there = tmp_path / "there"
    there.mkdir()
    (there / "learn").write_text("another text")
    add_tokenizer(there, "b", Tokenizer.train([there / "learn"]))
    with pytest.raises(UserError, match=r"made with another tokenizer 'b' than the one in .*`dcnr tokenizer delete b`"):
        Dataset.open(there, "d", storage)
    delete_tokenizer(there, "b")
    assert Dataset.open(there, "d", storage).tokenizer().end_id is not None


def test_damage_is_found_on_the_way_up_and_down(here: Path, storage: Storage, tmp_path: Path) -> None:
    """A shard that is not what its hash says is neither pushed nor kept; one that is gone is told at once."""
    push(here, storage)
    key = "datasets/d/train-00001.bin"
    good = bytes(asyncio.run(storage.get(key)))
    asyncio.run(storage.put(key, bytes(len(good))))
    opened = Dataset.open(tmp_path / "there", "d", storage)
    with pytest.raises(PeerError, match=r"train-00001\.bin is damaged"):
        opened.text("train", 600, 10)
    assert not (opened.folder / "train-00001.bin").exists()
    asyncio.run(storage.delete(key))
    with pytest.raises(UserError, match=r"train-00001\.bin of dataset 'd' is neither here nor, whole, in file://"):
        Dataset.open(tmp_path / "there", "d", storage)
    (dataset_folder(here, "d") / "train-00000.bin").write_bytes(bytes(1000))
    asyncio.run(storage.delete("datasets/"))
    with pytest.raises(UserError, match=r"train-00000\.bin is not what its dataset was made with"):
        push(here, storage)
    assert not asyncio.run(storage.exists("datasets/d/manifest.json"))
