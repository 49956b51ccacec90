"""Datasets on disk."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from dcnr.data.dataset import Dataset
from dcnr.data.manifest import check_free, dataset_folder, delete_dataset, encode_manifest, list_datasets, read_manifest
from dcnr.errors import AlreadyExists, NotFound, UserError
from dcnr.text.tokenizer import Tokenizer, add_tokenizer, delete_tokenizer, fingerprint

TEXT = "the cat sat on the mat\r\n\tand the 😀 hat\n" * 50
SEQ_LEN = 16


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory with a char tokenizer `c`; the text lies beside it in `text/`."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(TEXT.encode())
    add_tokenizer(tmp_path / "data", "c", Tokenizer.train([tmp_path / "text" / "a.txt"], "char"))
    return tmp_path / "data"


def text_of(data_dir: Path) -> Path:
    """The folder of text."""
    return data_dir.parent / "text"


def make(data_dir: Path, validation: float = 0.1, name: str = "d") -> Dataset:
    """A dataset of that folder."""
    return Dataset.create(data_dir, name, [text_of(data_dir)], "c", validation, SEQ_LEN)


def shard(data_dir: Path, split: str, dtype: str = "<u2") -> np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]:
    """The ids as they lie on disk."""
    return np.frombuffer((dataset_folder(data_dir, "d") / f"{split}-00000.bin").read_bytes(), dtype)


def test_shards_hold_the_ids_of_the_text_and_the_tail_is_for_validation(data_dir: Path) -> None:
    """Raw little-endian uint16; train then validation is the whole text."""
    made = make(data_dir)
    train, validation = shard(data_dir, "train"), shard(data_dir, "validation")
    assert made.tokenizer().decode([*train.tolist(), *validation.tolist()]) == TEXT
    assert len(train) == made.manifest.train_tokens == int(len(TEXT) * 0.9)
    assert len(validation) == made.manifest.validation_tokens


def test_the_manifest_says_what_it_is(data_dir: Path) -> None:
    """Counts, dtype, vocabulary, tokenizer and its hash, sources, bytes."""
    made = make(data_dir)
    fields = json.loads((dataset_folder(data_dir, "d") / "manifest.json").read_text())
    assert fields == {
        "name": "d",
        "tokenizer": "c",
        "tokenizer_sha256": fingerprint(data_dir, "c"),
        "vocab_size": len(set(TEXT)),
        "dtype": "uint16",
        "seq_len": SEQ_LEN,
        "strategy": "tail, 0.1",
        "splits": {
            split: {
                "tokens": len(shard(data_dir, split)),
                "bytes": len(made.tokenizer().decode(shard(data_dir, split).tolist()).encode()),
            }
            for split in ("train", "validation")
        },
        "shards": [
            {
                "file": f"{split}-00000.bin",
                "split": split,
                "tokens": len(shard(data_dir, split)),
                "sha256": hashlib.sha256(shard(data_dir, split).tobytes()).hexdigest(),
            }
            for split in ("train", "validation")
        ],
        "sources": [str(text_of(data_dir))],
        "files": 1,
        "skipped": 0,
        "documents": 1,
        "parent": None,
        "version": 2,
    }
    assert made.manifest.bytes == len(TEXT.encode())
    assert read_manifest(data_dir, "d") == made.manifest


def test_the_manifest_names_what_was_named(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Globs and relative paths, made absolute, not the files that they stand for."""
    monkeypatch.chdir(data_dir.parent)
    (text_of(data_dir) / "b.txt").write_bytes(TEXT.encode())
    made = Dataset.create(data_dir, "d", ["text/*.txt", "./text"], "c", 0.1, SEQ_LEN)
    assert made.manifest.sources == (str(text_of(data_dir) / "*.txt"), str(text_of(data_dir)))
    assert made.manifest.files == 2


def test_a_vocabulary_above_65536_is_stored_as_uint32(tmp_path: Path) -> None:
    """The smallest type that holds every id."""
    characters = [chr(code) for code in range(0x10000, 0x10000 + 65_537)]
    (tmp_path / "big.txt").write_text("".join(characters))
    add_tokenizer(tmp_path, "c", Tokenizer.train([tmp_path / "big.txt"], "char", 1 << 17))
    made = Dataset.create(tmp_path, "d", [tmp_path / "big.txt"], "c", 0.0)
    assert made.manifest.dtype == "uint32"
    assert shard(tmp_path, "train", "<u4").tolist() == list(range(65_537))
    assert made.batch("train", 1, 1, 2, 128).max() <= 65_536


def test_files_follow_one_another(data_dir: Path) -> None:
    """Each is tokenised on its own, in order; an empty one among them adds nothing."""
    (text_of(data_dir) / "b.txt").write_bytes(TEXT[::-1].encode())
    (text_of(data_dir) / "empty.txt").touch()
    made = make(data_dir, validation=0.0)
    assert made.tokenizer().decode(shard(data_dir, "train").tolist()) == TEXT + TEXT[::-1]
    assert made.manifest.files == 3


def test_batches_are_windows_of_the_split(data_dir: Path) -> None:
    """int64 [B, T + 1], every row a piece of the text."""
    made = make(data_dir)
    ids = made.batch("train", seed=3, step=2, batch=5, seq_len=SEQ_LEN)
    assert ids.shape == (5, SEQ_LEN + 1)
    assert ids.dtype == np.int64
    for row in ids:
        assert made.tokenizer().decode(row.tolist()) in TEXT


def test_one_epoch_shows_every_window_once(data_dir: Path) -> None:
    """All rows of the epoch, sorted by place, join to a stretch of the text."""
    made = make(data_dir, validation=0.0)
    windows = len(TEXT) // SEQ_LEN - 1
    rows = np.concatenate([made.batch("train", 3, step, 1, SEQ_LEN) for step in range(1, windows + 1)])
    whole = made.batch("train", 3, 1, windows, SEQ_LEN)
    assert (rows == whole).all()
    ids = shard(data_dir, "train").astype(np.int64)
    stretches = [np.concatenate([ids[o + i * SEQ_LEN :][: SEQ_LEN + 1] for i in range(windows)]) for o in range(SEQ_LEN)]
    assert any(sorted(map(tuple, whole)) == sorted(map(tuple, stretch.reshape(windows, -1))) for stretch in stretches)


def test_batches_do_not_depend_on_who_reads_or_what_was_read_before(data_dir: Path) -> None:
    """A fresh reader that asks only for a late step gets what the one that read all steps got."""
    one, steps = make(data_dir), range(1, 60)
    read = [one.batch("train", 9, step, 7, SEQ_LEN) for step in steps]
    for step in reversed(steps):
        assert (Dataset.open(data_dir, "d").batch("train", 9, step, 7, SEQ_LEN) == read[step - 1]).all()
    assert not (one.batch("train", 10, 1, 7, SEQ_LEN) == read[0]).all()


def test_a_batch_larger_than_an_epoch_runs_on_into_the_next(data_dir: Path) -> None:
    """The validation split has few windows."""
    made = make(data_dir)
    assert made.batch("validation", 1, 1, 100, SEQ_LEN).shape == (100, SEQ_LEN + 1)


@pytest.mark.parametrize("arguments", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_step_batch_and_length_count_from_one(data_dir: Path, arguments: tuple[int, int, int]) -> None:
    """Zero of anything is an error, not an empty array."""
    with pytest.raises(UserError, match="at least 1"):
        make(data_dir).batch("train", 1, *arguments)


@pytest.mark.parametrize(("tokens", "fits"), [(0, False), (1, False), (SEQ_LEN, False), (SEQ_LEN + 1, True)])
def test_the_shortest_dataset_is_one_window(data_dir: Path, tokens: int, fits: bool) -> None:
    """T + 1 tokens; what is shorter is refused with numbers and leaves nothing behind."""
    file = data_dir.parent / "short.txt"
    file.write_bytes(TEXT[:tokens].encode())
    if fits:
        made = Dataset.create(data_dir, "d", [file], "c", 0.0, SEQ_LEN)
        assert made.tokenizer().decode(made.batch("train", 1, 1, 1, SEQ_LEN)[0].tolist()) == TEXT[:tokens]
        return
    with pytest.raises(UserError, match=f"train split has {tokens} tokens, a window of sequence length 16 needs 17"):
        Dataset.create(data_dir, "d", [file], "c", 0.0, SEQ_LEN)
    assert list((data_dir / "datasets").iterdir()) == []


def test_a_split_too_short_for_the_network_is_refused_when_it_is_read(data_dir: Path) -> None:
    """A dataset without validation can train; asking for that split says why not."""
    made = make(data_dir, validation=0.0)
    made.require("train", SEQ_LEN)
    with pytest.raises(UserError, match="validation split has 0 tokens"):
        made.batch("validation", 1, 1, 1, SEQ_LEN)
    with pytest.raises(UserError, match=f"needs {len(TEXT) + 1}"):
        made.require("train", len(TEXT))


def test_bad_input_is_named_and_leaves_nothing(data_dir: Path) -> None:
    """Missing file, missing tokenizer, unknown character with its file, invalid UTF-8, impossible share."""
    (data_dir.parent / "odd.txt").write_text("the ß")
    (data_dir.parent / "bad.txt").write_bytes(b"the \xff")
    cases: list[tuple[list[str | Path], str, float, str]] = [
        (["missing.txt"], "c", 0.1, "'missing.txt' does not exist"),
        ([text_of(data_dir)], "x", 0.1, "no tokenizer 'x'"),
        ([data_dir.parent / "odd.txt"], "c", 0.1, r"odd\.txt: the tokenizer does not know 'ß'"),
        ([data_dir.parent / "bad.txt"], "c", 0.1, r"bad\.txt: invalid UTF-8 at byte 4"),
        ([text_of(data_dir)], "c", 1.0, "validation 1.0"),
    ]
    for sources, tokenizer, validation, message in cases:
        with pytest.raises(UserError, match=message):
            Dataset.create(data_dir, "d", sources, tokenizer, validation, SEQ_LEN)
        assert not list(data_dir.glob("datasets/*"))
    with pytest.raises(UserError, match="not a valid dataset name"):
        Dataset.create(data_dir, "a/b", [text_of(data_dir)], "c")


def test_a_taken_name_is_refused_and_kept(data_dir: Path) -> None:
    """The first one stays as it is."""
    first = make(data_dir)
    with pytest.raises(AlreadyExists, match="'d' already"):
        make(data_dir, validation=0.5)
    assert read_manifest(data_dir, "d") == first.manifest


@pytest.mark.parametrize("fields", [{"name": "d", "version": 1, "train_tokens": 5}, {"name": "d", "version": 3}])
def test_a_dataset_of_another_format_is_refused_in_words(data_dir: Path, fields: dict[str, object]) -> None:
    """It says which, and what to do; it can be deleted."""
    folder = dataset_folder(data_dir, "d")
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=f"'d' has format {fields['version']}, this program reads 2.*`dcnr dataset delete d`"):
        Dataset.open(data_dir, "d")
    delete_dataset(data_dir, "d")


@pytest.mark.parametrize("tokens", [0, 1, 2, SEQ_LEN, SEQ_LEN + 1, SEQ_LEN + 2, 5 * SEQ_LEN + 1, 5 * SEQ_LEN + 7])
def test_windows_show_every_token_but_the_first_as_a_target_once(data_dir: Path, tokens: int) -> None:
    """In order, whatever is left over in a last window that ends with no target; of no or one token there are none."""
    file = data_dir.parent / "more.txt"
    file.write_bytes((TEXT[: 4 * SEQ_LEN] + TEXT[:tokens]).encode())
    ratio = tokens / (4 * SEQ_LEN + tokens)
    made = Dataset.create(data_dir, "d", [file], "c", ratio, SEQ_LEN)
    ids = shard(data_dir, "validation").tolist() if tokens else []
    assert len(ids) == tokens
    windows = made.windows("validation", SEQ_LEN)
    assert windows == -(-max(tokens - 1, 0) // SEQ_LEN)
    rows = [row for at in range(windows) for row in made.window_rows("validation", at, 1, SEQ_LEN)]
    targets = [int(target) for row in rows for target in row[1:] if target >= 0]
    assert targets == ids[1:]
    assert [int(row[0]) for row in rows] == ids[: -1 or None : SEQ_LEN][:windows]
    if windows:
        assert (made.window_rows("validation", 0, windows, SEQ_LEN) == np.stack(rows)).all()
    with pytest.raises(UserError, match=f"has {windows} windows"):
        made.window_rows("validation", windows, 1, SEQ_LEN)


def test_a_damaged_id_never_leaves(data_dir: Path) -> None:
    """Neither in a batch nor in a window: an embedder would read behind its table."""
    made = make(data_dir)
    ids = np.full(made.manifest.train_tokens, len(set(TEXT)), dtype="<u2")
    (dataset_folder(data_dir, "d") / "train-00000.bin").write_bytes(ids.tobytes())
    opened = Dataset.open(data_dir, "d")
    (problem,) = opened.problems()
    assert "train-00000.bin is damaged: its sha256 is" in problem
    wrong = f"'d' is damaged: it holds id {len(set(TEXT))}, its vocabulary has {len(set(TEXT))}"
    with pytest.raises(UserError, match=wrong):
        opened.batch("train", 1, 1, 1, SEQ_LEN)
    with pytest.raises(UserError, match=wrong):
        opened.window_rows("train", 0, 1, SEQ_LEN)


def test_list_and_delete(data_dir: Path) -> None:
    """By name, also one that cannot be read; a half-made hidden folder is none; what is deleted is gone."""
    assert list_datasets(data_dir) == {}
    made = [make(data_dir, name=name).manifest for name in ("a", "b")]
    for name, manifest in ((".c-x", made[0]), ("old", None)):
        (data_dir / "datasets" / name).mkdir()
        (data_dir / "datasets" / name / "manifest.json").write_bytes(encode_manifest(manifest) if manifest else b'{"version": 1}')
    found = list_datasets(data_dir)
    assert list(found) == ["a", "b", "old"]
    assert [found["a"], found["b"]] == made
    assert "'old' has format 1" in str(found["old"])
    delete_dataset(data_dir, "a")
    check_free(data_dir, "a")
    for forgotten in (delete_dataset, Dataset.open):
        with pytest.raises(NotFound, match="no dataset 'a'"):
            forgotten(data_dir, "a")


def test_damaged_files_are_refused(data_dir: Path) -> None:
    """A shard that lost its end, a manifest that is none; both can still be deleted."""
    make(data_dir)
    with (dataset_folder(data_dir, "d") / "train-00000.bin").open("r+b") as file:
        file.truncate(10)
    with pytest.raises(UserError, match=r"train-00000\.bin should have \d+ bytes and has 10"):
        Dataset.open(data_dir, "d")
    (dataset_folder(data_dir, "d") / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        Dataset.open(data_dir, "d")
    delete_dataset(data_dir, "d")


def test_another_tokenizer_of_the_same_name_is_noticed(data_dir: Path) -> None:
    """Its ids would mean other characters."""
    made = make(data_dir)
    delete_tokenizer(data_dir, "c")
    (data_dir.parent / "other.txt").write_text("other")
    add_tokenizer(data_dir, "c", Tokenizer.train([data_dir.parent / "other.txt"], "char"))
    with pytest.raises(UserError, match="'c' is not the one that made dataset 'd'"):
        made.tokenizer()


def test_progress_counts_bytes_to_the_end(data_dir: Path) -> None:
    """The last call says that all was tokenised."""
    seen: list[tuple[int, int]] = []
    Dataset.create(data_dir, "d", [text_of(data_dir)], "c", 0.1, SEQ_LEN, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(TEXT.encode()),) * 2


def test_a_split_without_a_token_to_predict_has_no_windows(data_dir: Path) -> None:
    """And no bytes to speak of; those of both splits are the whole text."""
    none, some = make(data_dir, 0.0), make(data_dir, 0.1, "e")
    assert (none.windows("validation", 8), none.manifest.bytes_of("validation")) == (0, 0)
    assert some.manifest.bytes_of("train") + some.manifest.bytes_of("validation") == pytest.approx(len(TEXT.encode()))
