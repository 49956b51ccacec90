"""What a dataset is, and where datasets are.

`datasets/<name>/` in a data directory (and in a storage, under the same keys) holds `manifest.json` and the shards that it lists: raw
little-endian ids, uint16 where the vocabulary allows, else uint32. The tokens of a split are its shards one after the other.

Rule 1: a dataset without manifest does not exist; the manifest comes last and goes first.
Rule 2: every shard's sha256 stands in the manifest.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from dcnr.data.split import SPLITS, Split
from dcnr.errors import AlreadyExists, NotFound, UserError
from dcnr.ids import check_id

Dtype = Literal["uint16", "uint32"]
Ids = npt.NDArray[np.unsignedinteger]

VERSION = 2
MANIFEST_NAME = "manifest.json"
_ANEW = "delete the dataset and create it again"


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of ids, all of one split."""

    file: str
    split: Split
    tokens: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Contents:
    """What all shards of one split hold: `bytes` of text (UTF-8, special tokens count none)."""

    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class DatasetManifest:
    """What a dataset is. `sources` are what was named, absolute; `files` counts what they stood for, `skipped` how many files of the
    folders are no text; `documents` is 0 where nobody counted them. `strategy` says in words how it was split, `parent` of which dataset
    it was derived.
    `seq_len` is the sequence length that it was made for.
    """

    name: str
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    dtype: Dtype
    seq_len: int
    strategy: str
    splits: dict[Split, Contents]
    shards: tuple[Shard, ...]
    sources: tuple[str, ...]
    files: int = 0
    skipped: int = 0
    documents: int = 0
    parent: str | None = None
    version: int = field(default=VERSION)

    def tokens(self, split: Split) -> int:
        """Tokens of one split."""
        return self.splits[split].tokens

    def bytes_of(self, split: Split) -> int:
        """Bytes of the text of one split: bits per byte = loss / ln 2 * tokens / bytes."""
        return self.splits[split].bytes

    def shards_of(self, split: Split) -> tuple[Shard, ...]:
        """The shards of one split, in order."""
        return tuple(shard for shard in self.shards if shard.split == split)

    @property
    def train_tokens(self) -> int:
        """`tokens("train")`."""
        return self.tokens("train")

    @property
    def validation_tokens(self) -> int:
        """`tokens("validation")`."""
        return self.tokens("validation")

    @property
    def bytes(self) -> int:
        """Bytes of the text of both splits."""
        return sum(self.bytes_of(split) for split in SPLITS)

    @property
    def stored(self) -> np.dtype[np.unsignedinteger]:
        """How an id lies in a shard."""
        return stored(self.dtype)


_MANIFEST = TypeAdapter(DatasetManifest)


def dtype_for(vocab_size: int) -> Dtype:
    """The smallest type that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def stored(dtype: Dtype) -> np.dtype[np.unsignedinteger]:
    """The same, in the byte order of files."""
    return np.dtype(dtype).newbyteorder("<")


def encode_manifest(manifest: DatasetManifest) -> bytes:
    """As `manifest.json` has it."""
    return _MANIFEST.dump_json(manifest, indent=2)


def decode_manifest(data: bytes, name: str, where: str) -> DatasetManifest:
    """The manifest of dataset `name`, read from `where`. Raises `UserError` for a damaged one and for one of another version."""
    try:
        fields = json.loads(data)
        version = fields.get("version") if isinstance(fields, dict) else None
        if isinstance(version, int) and version != VERSION:
            other = f"dataset '{name}' has format {version}, this program reads {VERSION} ({where})"
            raise UserError(other, f"`dcnr dataset delete {name}`, and create it again")
        manifest = _MANIFEST.validate_json(data)
    except ValueError as error:  # of JSON, or pydantic's
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise UserError(f"{where} is damaged: {what}", _ANEW) from error
    if manifest.name != name or set(manifest.splits) != set(SPLITS):
        raise UserError(f"{where} is damaged: it is not the manifest of dataset '{name}'", _ANEW)
    for split in SPLITS:
        if sum(shard.tokens for shard in manifest.shards_of(split)) != manifest.tokens(split):
            raise UserError(f"{where} is damaged: the shards do not hold the {split} tokens it counts", _ANEW)
    return manifest


# -- datasets of a data directory --------------------------------------------------------------------------------------


def dataset_folder(data_dir: Path, name: str) -> Path:
    """Where the dataset `name` is kept."""
    return data_dir / "datasets" / check_id(name, "dataset")


def unfinished_folder(data_dir: Path, name: str) -> Path:
    """Where the dataset `name` is being made."""
    folder = dataset_folder(data_dir, name)
    return folder.with_name(f".{folder.name}.unfinished")


def has_dataset(data_dir: Path, name: str) -> bool:
    """Whether there is a dataset `name`, of whatever format."""
    return (dataset_folder(data_dir, name) / MANIFEST_NAME).exists()


def check_free(data_dir: Path, name: str) -> Path:
    """The folder of a dataset that does not exist yet; raises `AlreadyExists`."""
    folder = dataset_folder(data_dir, name)
    if folder.exists():
        raise AlreadyExists(f"there is a dataset '{name}' already", "choose another name or delete it first")
    return folder


def list_datasets(data_dir: Path) -> dict[str, DatasetManifest | UserError]:
    """All datasets by name, in order; for each its manifest, or why that cannot be read."""
    names = sorted(path.parent.name for path in (data_dir / "datasets").glob(f"[!.]*/{MANIFEST_NAME}"))
    return {name: _manifest_or_error(data_dir, name) for name in names}


def _manifest_or_error(data_dir: Path, name: str) -> DatasetManifest | UserError:
    try:
        return read_manifest(data_dir, name)
    except UserError as error:
        return error


def read_manifest(data_dir: Path, name: str) -> DatasetManifest:
    """What dataset `name` is."""
    file = dataset_folder(data_dir, name) / MANIFEST_NAME
    if not file.exists():
        raise NotFound(f"there is no dataset '{name}' in {data_dir}", "make one with `dcnr dataset create`")
    return decode_manifest(file.read_bytes(), name, str(file))


def delete_dataset(data_dir: Path, name: str) -> None:
    """Remove dataset `name`, also a damaged or unfinished one."""
    folder, unfinished = dataset_folder(data_dir, name), unfinished_folder(data_dir, name)
    if not folder.exists() and not unfinished.exists():
        raise NotFound(f"there is no dataset '{name}' in {data_dir}", "see `dcnr dataset list`")
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    for remains in (folder, unfinished):
        shutil.rmtree(remains, ignore_errors=not remains.exists())
