"""Tokenised text on disk: made once, mapped into memory by every reader.

`datasets/<name>/` in a data directory holds `train.bin` and `validation.bin`, raw little-endian ids (uint16 where the vocabulary
allows, else uint32), and `manifest.json`, which says what they are.

Rule 1: a dataset is complete or does not exist: it is made in a hidden folder beside its place, manifest last, and renamed at the end.
Rule 2: the text streams through in pieces; memory does not grow with it.
Rule 3: the ids of a step are a function of (split, seed, step, batch, sequence length): see `batches`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from dcnr.data.batches import batch_starts, epoch_starts, gather, windows_per_epoch
from dcnr.data.split import SPLITS, Split, split_by_tail
from dcnr.errors import AlreadyExists, NotFound, UserError
from dcnr.ids import check_id
from dcnr.text.preprocess import find_files, read_pieces, total_bytes
from dcnr.text.tokenizer import OnProgress, Tokenizer, fingerprint, no_progress, open_tokenizer

Dtype = Literal["uint16", "uint32"]
Ids = npt.NDArray[np.unsignedinteger]

DEFAULT_SEQ_LEN = 128
_PIECES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class DatasetManifest:
    """What a dataset is. `sources` are the files, folders and globs that were named, absolute; `files` counts what they stood for,
    `bytes` is the size of that text, `skipped` how many files of the folders are none; `seq_len` is what `batch` takes if it is not told.
    """

    name: str
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    dtype: Dtype
    train_tokens: int
    validation_tokens: int
    seq_len: int
    files: int
    bytes: int
    sources: tuple[str, ...]
    skipped: int = 0
    version: int = 1

    def tokens(self, split: Split) -> int:
        """Tokens of one split."""
        return self.train_tokens if split == "train" else self.validation_tokens

    def bytes_of(self, split: Split) -> float:
        """Bytes of text of one split: of all the text, in proportion to its tokens."""
        return self.bytes * self.tokens(split) / max(1, self.train_tokens + self.validation_tokens)


_MANIFEST = TypeAdapter(DatasetManifest)


class Dataset:
    """One dataset, open for reading."""

    def __init__(self, folder: Path, manifest: DatasetManifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._ids = {split: _map(folder / f"{split}.bin", manifest.dtype, manifest.tokens(split)) for split in SPLITS}
        self._epoch_starts = lru_cache(maxsize=2)(epoch_starts)

    @classmethod
    def create(
        cls,
        data_dir: Path,
        name: str,
        sources: Sequence[str | Path],
        tokenizer_name: str,
        validation: float = 0.1,
        seq_len: int = DEFAULT_SEQ_LEN,
        on_progress: OnProgress = no_progress,
    ) -> Self:
        """Tokenise `sources` (files, folders, globs; each file on its own) and keep the ids as dataset `name`.

        Raises `UserError` for what is missing, empty, not UTF-8, unknown to the tokenizer or shorter than one window of `seq_len`;
        then nothing is left behind.
        """
        if not 0 <= validation < 1 or seq_len < 1:
            raise UserError(f"validation {validation} or sequence length {seq_len} is not possible", "use 0 <= validation < 1, length >= 1")
        folder = check_free(data_dir, name)
        tokenizer = open_tokenizer(data_dir, tokenizer_name)
        found = find_files(sources)
        files = found.files
        dtype: Dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        with _made_at(folder) as hidden:
            tokens = _write_ids(hidden / "train.bin", _stored(dtype), tokenizer, files, on_progress)
            train, rest = split_by_tail(tokens, validation)
            _check_length(name, "train", train, seq_len)
            _move_tail(hidden, train * _stored(dtype).itemsize)
            sha256 = fingerprint(data_dir, tokenizer_name)
            of_text = (len(files), total_bytes(files), tuple(map(os.path.abspath, sources)), found.skipped)
            manifest = DatasetManifest(name, tokenizer_name, sha256, tokenizer.vocab_size, dtype, train, rest, seq_len, *of_text)
            (hidden / "manifest.json").write_bytes(_MANIFEST.dump_json(manifest, indent=2))
        return cls(folder, manifest)

    @classmethod
    def open(cls, data_dir: Path, name: str) -> Self:
        """Open dataset `name`; raises `NotFound`, or `UserError` if its files are damaged."""
        manifest = read_manifest(data_dir, name)
        return cls(dataset_folder(data_dir, name), manifest)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer it was made with; raises if that has been replaced since."""
        data_dir, name = self.folder.parent.parent, self.manifest.tokenizer
        tokenizer = open_tokenizer(data_dir, name)
        if fingerprint(data_dir, name) != self.manifest.tokenizer_sha256:
            raise UserError(f"tokenizer '{name}' is not the one that made dataset '{self.manifest.name}'", "create the dataset again")
        return tokenizer

    def require(self, split: Split, seq_len: int) -> None:
        """Raise `UserError` unless `split` has at least one window of `seq_len` + 1 tokens."""
        _check_length(self.manifest.name, split, self.manifest.tokens(split), seq_len)

    def batch(self, split: Split, seed: int, step: int, batch: int, seq_len: int) -> npt.NDArray[np.int64]:
        """The ids [B, T + 1] of step `step` (counted from 1): columns [:-1] are inputs, [1:] targets."""
        if step < 1 or batch < 1 or seq_len < 1:
            raise UserError(f"step {step}, batch {batch}, sequence length {seq_len}: each must be at least 1")
        self.require(split, seq_len)
        tokens = self.manifest.tokens(split)
        windows = windows_per_epoch(tokens, seq_len)
        starts = batch_starts(lambda epoch: self._epoch_starts(tokens, seq_len, seed, epoch), windows, step, batch)
        return gather(self._ids[split], starts, seq_len)

    def windows(self, split: Split, seq_len: int) -> int:
        """How many windows hold all of a split; 0 if it has no token to predict."""
        return -(-max(0, self.manifest.tokens(split) - 1) // seq_len)

    def window_rows(self, split: Split, first: int, count: int, seq_len: int) -> npt.NDArray[np.int64]:
        """The ids [count, T + 1] of windows `first` on, in the order of the split; where it has ended they are -1.

        Each begins with the last token of the one before, so that every token but the first of the split is a target once.
        """
        if not 0 <= first <= first + count <= self.windows(split, seq_len):
            raise UserError(f"dataset '{self.manifest.name}' has no windows {first} to {first + count} in its {split} split")
        ids = self._ids[split][first * seq_len : (first + count) * seq_len + 1].astype(np.int64)
        padded = np.full(count * seq_len + 1, -1, np.int64)
        padded[: len(ids)] = ids
        return np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(padded, seq_len + 1)[::seq_len])


def _stored(dtype: Dtype) -> np.dtype[np.unsignedinteger]:
    return np.dtype(dtype).newbyteorder("<")


def _map(file: Path, dtype: Dtype, tokens: int) -> Ids:
    stored = _stored(dtype)
    wanted = tokens * stored.itemsize
    size = file.stat().st_size if file.exists() else 0
    if size != wanted:
        raise UserError(f"{file} should have {wanted} bytes and has {size}", "delete the dataset and create it again")
    return np.memmap(file, dtype=stored, mode="r") if tokens else np.empty(0, dtype=stored)


@contextmanager
def _made_at(folder: Path) -> Iterator[Path]:
    """A hidden folder that becomes `folder` if the block succeeds, and vanishes otherwise."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as outer:
        hidden = Path(outer) / folder.name
        hidden.mkdir()
        yield hidden
        hidden.rename(folder)


def _write_ids(
    file: Path, stored: np.dtype[np.unsignedinteger], tokenizer: Tokenizer, files: Sequence[Path], on_progress: OnProgress
) -> int:
    total, done, tokens = total_bytes(files), 0, 0
    pieces = _checked_pieces(tokenizer, files)
    with file.open("wb") as out:
        while some := list(islice(pieces, _PIECES_AT_ONCE)):
            encoded = tokenizer.encode_batch(some)
            out.writelines(ids.astype(stored).tobytes() for ids in encoded)
            tokens += sum(map(len, encoded))
            done += sum(len(piece.encode()) for piece in some)
            on_progress(done, total)
    return tokens


def _checked_pieces(tokenizer: Tokenizer, files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        for piece in read_pieces(file):
            try:
                tokenizer.check(piece)
            except UserError as error:
                raise UserError(f"{file}: {error.message}", error.remedy) from error
            yield piece


def _move_tail(folder: Path, size: int) -> None:
    """Cut `train.bin` after `size` bytes; what follows becomes `validation.bin`."""
    with (folder / "train.bin").open("r+b") as train, (folder / "validation.bin").open("wb") as validation:
        train.seek(size)
        shutil.copyfileobj(train, validation, 1 << 20)
        train.truncate(size)


def _check_length(name: str, split: Split, tokens: int, seq_len: int) -> None:
    if tokens > seq_len:
        return
    raise UserError(
        f"dataset '{name}': the {split} split has {tokens} tokens, a window of sequence length {seq_len} needs {seq_len + 1}",
        "give more text or a shorter sequence" if tokens else "give text that is not empty, or another share for validation",
    )


# -- datasets of a data directory --------------------------------------------------------------------------------------


def dataset_folder(data_dir: Path, name: str) -> Path:
    """Where the dataset `name` is kept."""
    return data_dir / "datasets" / check_id(name, "dataset")


def check_free(data_dir: Path, name: str) -> Path:
    """The folder of a dataset that does not exist yet; raises `AlreadyExists`."""
    folder = dataset_folder(data_dir, name)
    if folder.exists():
        raise AlreadyExists(f"there is a dataset '{name}' already", "choose another name or delete it first")
    return folder


def list_datasets(data_dir: Path) -> list[DatasetManifest]:
    """The manifests of all datasets, by name."""
    names = sorted(path.parent.name for path in (data_dir / "datasets").glob("[!.]*/manifest.json"))
    return [read_manifest(data_dir, name) for name in names]


def read_manifest(data_dir: Path, name: str) -> DatasetManifest:
    """What dataset `name` is."""
    file = dataset_folder(data_dir, name) / "manifest.json"
    if not file.exists():
        raise NotFound(f"there is no dataset '{name}' in {data_dir}", "make one with `dcnr dataset create`")
    try:
        return _MANIFEST.validate_json(file.read_bytes())
    except ValidationError as error:
        raise UserError(f"{file} is damaged: {error.errors()[0]['msg']}", "delete the dataset and create it again") from error


def delete_dataset(data_dir: Path, name: str) -> None:
    """Remove dataset `name`, also a damaged one."""
    folder = dataset_folder(data_dir, name)
    if not folder.exists():
        raise NotFound(f"there is no dataset '{name}' in {data_dir}", "see `dcnr dataset list`")
    (folder / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(folder)
