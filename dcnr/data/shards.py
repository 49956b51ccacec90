"""The tokens of a split, over the files that hold them.

Rule 1: a shard is mapped into memory when it is first read; one that is not here is fetched from the storage first, and kept.
Rule 2: what comes from a storage is checked against its sha256 before it is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dcnr.data.manifest import Contents, DatasetManifest, Ids, Shard
from dcnr.data.split import SPLITS, Span, Split
from dcnr.data.transfer import check_there, fetch_blob, key_of
from dcnr.errors import UserError
from dcnr.storage.base import Storage
from dcnr.storage.file import write_file

SHARD_TOKENS = 1 << 24
"""Of every shard but the last of a split: 32 or 64 MiB."""
BLOCK_TOKENS = 1 << 20
"""How many go from file to file at once."""

MAX_OPEN = 256
"""Shards of one stream that are mapped at once: each takes one of the files that a process may have open."""


class TokenStream:
    """The tokens of shards that follow one another; `open_shard` gives those of one."""

    def __init__(self, shards: Sequence[Shard], open_shard: Callable[[Shard], Ids]) -> None:
        self._shards = tuple(shards)
        self._ends = np.cumsum([0, *(shard.tokens for shard in shards)])[1:]
        self._open = lru_cache(maxsize=MAX_OPEN)(open_shard)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._shards else 0

    def read(self, start: int, stop: int) -> Ids:
        """Tokens `start` to below `stop`, which must exist; a view where one shard holds them."""
        index = int(np.searchsorted(self._ends, start, side="right"))
        found = []
        while True:
            shard = self._shards[index]
            begin = int(self._ends[index]) - shard.tokens
            found.append(self._open(shard)[max(start - begin, 0) : stop - begin])
            if stop <= self._ends[index]:
                return found[0] if len(found) == 1 else np.concatenate(found)
            index += 1


class Shelf:
    """The shards of one dataset: in its folder, or yet to be fetched from a storage."""

    def __init__(self, folder: Path, manifest: DatasetManifest, storage: Storage | None) -> None:
        self._folder, self._manifest, self._storage = folder, manifest, storage
        missing = [shard for shard in manifest.shards if not self._is_here(shard)]
        if missing and storage is not None:
            check_there(storage, manifest.name, {shard.file: self._size(shard) for shard in missing})

    def stream(self, split: Split) -> TokenStream:
        """The tokens of one split."""
        return TokenStream(self._manifest.shards_of(split), self._map)

    def whole(self) -> TokenStream:
        """All tokens, training before validation."""
        return TokenStream([shard for split in SPLITS for shard in self._manifest.shards_of(split)], self._map)

    def problems(self) -> Iterator[str]:
        """What is wrong with each shard, after reading all of them; what is not here is fetched."""
        for shard in self._manifest.shards:
            path = self._file(shard)
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != shard.sha256:
                yield f"{path} is damaged: its sha256 is {found[:12]}…, not {shard.sha256[:12]}…"

    def _map(self, shard: Shard) -> Ids:
        return map_ids(self._file(shard), self._manifest.stored)

    def _file(self, shard: Shard) -> Path:
        path = self._folder / shard.file
        if not self._is_here(shard):
            assert self._storage is not None
            write_file(path, fetch_blob(self._storage, key_of(self._manifest.name, shard.file), shard.sha256))
        return path

    def _size(self, shard: Shard) -> int:
        return shard.tokens * self._manifest.stored.itemsize

    def _is_here(self, shard: Shard) -> bool:
        """Raises `UserError` for a file of the wrong size, and for one that nobody has."""
        path = self._folder / shard.file
        wanted = self._size(shard)
        size = path.stat().st_size if path.exists() else None
        if size == wanted:
            return True
        if size is None and self._storage is not None:
            return False
        have = "is missing" if size is None else f"has {size}"
        raise UserError(f"{path} should have {wanted} bytes and {have}", "delete the dataset, and create it or fetch it again")


def map_ids(file: Path, stored: np.dtype[np.unsignedinteger]) -> Ids:
    """The ids of a file that is not empty."""
    return np.memmap(file, dtype=stored, mode="r")


def blocks(stream: TokenStream, spans: Iterable[Span]) -> Iterator[tuple[Split, Ids]]:
    """The tokens of `spans`, a block at a time."""
    for start, stop, split in spans:
        for at in range(start, stop, BLOCK_TOKENS):
            yield split, stream.read(at, min(stop, at + BLOCK_TOKENS))


def write_shards(
    folder: Path, found: Iterable[tuple[Split, Ids]], stored: np.dtype[np.unsignedinteger], token_bytes: npt.NDArray[np.int64]
) -> tuple[tuple[Shard, ...], dict[Split, Contents]]:
    """Make `folder`, and in it the shards of all splits of what was `found`; and what each split holds."""
    folder.mkdir()
    with ExitStack() as stack:
        writers = {split: stack.enter_context(closing(ShardWriter(folder, split, stored, token_bytes))) for split in SPLITS}
        for split, ids in found:
            writers[split].write(ids)
    shards = tuple(shard for writer in writers.values() for shard in writer.shards)
    return shards, {split: writer.contents for split, writer in writers.items()}


class ShardWriter:
    """Writes the shards of one split, and counts what they hold. `token_bytes`: bytes of text that each id stands for."""

    def __init__(self, folder: Path, split: Split, stored: np.dtype[np.unsignedinteger], token_bytes: npt.NDArray[np.int64]) -> None:
        self._folder, self._split, self._stored, self._token_bytes = folder, split, stored, token_bytes
        self._shards: list[Shard] = []
        self._tokens = self._bytes = self._here = 0
        self._open_next()

    def write(self, ids: Ids) -> None:
        """Append `ids`. Raises `UserError` for one that is not in the vocabulary."""
        if not len(ids):
            return
        largest = int(ids.max())
        if largest >= len(self._token_bytes):
            at = self._tokens + int(np.argmax(ids == largest))
            last = len(self._token_bytes) - 1
            raise UserError(
                f"token {at} of the {self._split} split has id {largest}, the tokenizer's last is {last}",
                "name the tokenizer that made the ids",
            )
        self._bytes += int(self._token_bytes[ids].sum())
        self._tokens += len(ids)
        while len(ids):
            if self._here == SHARD_TOKENS:
                self._close_shard()
                self._open_next()
            taken = ids[: SHARD_TOKENS - self._here]
            data = np.ascontiguousarray(taken, self._stored).tobytes()
            self._file.write(data)
            self._hash.update(data)
            self._here += len(taken)
            ids = ids[len(taken) :]

    def close(self) -> None:
        """End the last shard."""
        self._close_shard()

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Those that were ended."""
        return tuple(self._shards)

    @property
    def contents(self) -> Contents:
        """What was written."""
        return Contents(self._tokens, self._bytes)

    def _open_next(self) -> None:
        self._name = f"{self._split}-{len(self._shards):05d}.bin"
        self._file = (self._folder / self._name).open("wb")
        self._hash = hashlib.sha256()
        self._here = 0

    def _close_shard(self) -> None:
        self._file.close()
        if self._here:
            self._shards.append(Shard(self._name, self._split, self._here, self._hash.hexdigest()))
        else:
            (self._folder / self._name).unlink()
