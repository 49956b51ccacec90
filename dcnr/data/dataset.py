"""Tokenised text: made once, mapped into memory by every reader.

Rule 1: the ids of a step are a function of (split, seed, step, batch, sequence length): see `batches`.
Rule 2: validation reads a split in order, every token but the first a target exactly once.
Rule 3: no id that the vocabulary does not have leaves here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from dcnr.data.batches import batch_starts, epoch_starts, gather, windows_per_epoch
from dcnr.data.create import DEFAULT_SEQ_LEN, Recipe, create_dataset
from dcnr.data.manifest import DatasetManifest, dataset_folder, has_dataset, read_manifest
from dcnr.data.shards import Shelf, TokenStream
from dcnr.data.split import SPLITS, Split, SplitRule, check_length
from dcnr.data.transfer import fetch_dataset, is_of
from dcnr.errors import UserError
from dcnr.storage.base import Storage
from dcnr.text.tokenizer import OnProgress, Tokenizer, fingerprint, no_progress, open_tokenizer

NO_TARGET = -1
"""Fills what is behind the last token of a split."""


class Dataset:
    """One dataset, open for reading."""

    def __init__(self, folder: Path, manifest: DatasetManifest, storage: Storage | None = None) -> None:
        self.folder = folder
        self.manifest = manifest
        self._shelf = Shelf(folder, manifest, storage)
        self._streams = {split: self._shelf.stream(split) for split in SPLITS}
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
        """`create_dataset`, split by tail."""
        recipe = Recipe(seq_len, SplitRule(validation=validation))
        return cls(dataset_folder(data_dir, name), create_dataset(data_dir, name, sources, tokenizer_name, recipe, on_progress))

    @classmethod
    def open(cls, data_dir: Path, name: str, storage: Storage | None = None) -> Self:
        """Open dataset `name`; raises `NotFound`, or `UserError` if its files are damaged.

        One that is not in `data_dir` is looked for in `storage`; its shards come from there when they are first read. Then, and whenever a
        shard is read, this must not be the thread of a loop.
        """
        if storage is not None and is_of(storage, data_dir):
            storage = None
        if storage is not None and not has_dataset(data_dir, name):
            fetch_dataset(data_dir, name, storage)
        return cls(dataset_folder(data_dir, name), read_manifest(data_dir, name), storage)

    @property
    def data_dir(self) -> Path:
        """Where it is kept."""
        return self.folder.parent.parent

    def tokenizer(self) -> Tokenizer:
        """The tokenizer it was made with; raises if that has been replaced since."""
        name = self.manifest.tokenizer
        tokenizer = open_tokenizer(self.data_dir, name)
        if fingerprint(self.data_dir, name) != self.manifest.tokenizer_sha256:
            raise UserError(f"tokenizer '{name}' is not the one that made dataset '{self.manifest.name}'", "create the dataset again")
        return tokenizer

    def require(self, split: Split, seq_len: int) -> None:
        """Raise `UserError` unless `split` has at least one window of `seq_len` + 1 tokens."""
        check_length(self.manifest.name, split, self.manifest.tokens(split), seq_len)

    def batch(self, split: Split, seed: int, step: int, batch: int, seq_len: int) -> npt.NDArray[np.int64]:
        """The ids [B, T + 1] of step `step` (counted from 1): columns [:-1] are inputs, [1:] targets."""
        if step < 1 or batch < 1 or seq_len < 1:
            raise UserError(f"step {step}, batch {batch}, sequence length {seq_len}: each must be at least 1")
        self.require(split, seq_len)
        tokens = self.manifest.tokens(split)
        windows = windows_per_epoch(tokens, seq_len)
        starts = batch_starts(lambda epoch: self._epoch_starts(tokens, seq_len, seed, epoch), windows, step, batch)
        return self._known(gather(self._streams[split].read, starts, seq_len))

    def windows(self, split: Split, seq_len: int) -> int:
        """How many windows of `seq_len` targets it takes to see every token of `split` but the first as a target; the last may be short."""
        return -(-max(self.manifest.tokens(split) - 1, 0) // seq_len)

    def window_rows(self, split: Split, first: int, count: int, seq_len: int) -> npt.NDArray[np.int64]:
        """The ids [count, T + 1] of windows `first` and following, in order: window w begins at token w * T.

        Behind the end of the split stands `NO_TARGET`, in the inputs too, where any id of the vocabulary will do.
        """
        if first < 0 or count < 1 or first + count > self.windows(split, seq_len):
            there = self.windows(split, seq_len)
            raise UserError(f"the {split} split has {there} windows of {seq_len}, not {first} to {first + count - 1}")
        start = first * seq_len
        stop = min(start + count * seq_len + 1, self.manifest.tokens(split))
        flat = np.full(count * seq_len + 1, NO_TARGET, dtype=np.int64)
        flat[: stop - start] = self._streams[split].read(start, stop)
        return self._known(np.lib.stride_tricks.sliding_window_view(flat, seq_len + 1)[::seq_len].copy())

    def text(self, split: Split, first: int, tokens: int) -> str:
        """The text of so many tokens (or as many as there are) of a split."""
        stop = min(first + tokens, self.manifest.tokens(split))
        return self.tokenizer().decode(self._streams[split].read(first, stop).tolist()) if first < stop else ""

    def whole(self) -> TokenStream:
        """All tokens, training before validation."""
        return self._shelf.whole()

    def problems(self) -> list[str]:
        """What is wrong with its shards, in words, after reading all of them."""
        return list(self._shelf.problems())

    def _known(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if ids.max() >= self.manifest.vocab_size:
            wrong, size = int(ids.max()), self.manifest.vocab_size
            raise UserError(f"dataset '{self.manifest.name}' is damaged: it holds id {wrong}, its vocabulary has {size}", "create it again")
        return ids
