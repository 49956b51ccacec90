"""A text and a data directory for the tests of datasets."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from dcnr.data.manifest import DatasetManifest, Ids, dataset_folder
from dcnr.data.split import Split
from dcnr.text.tokenizer import Tokenizer, add_tokenizer

END = "<|endoftext|>"
WORDS = ("the cat", "sat\ton", "a mat\r\n", "and 😀", "the e\u0301 hat.", "中文\n")


def text_of(count: int, seed: int = 1) -> str:
    """So many words, separated by blanks."""
    digest = hashlib.sha256(str(seed).encode()).digest()
    return " ".join(WORDS[digest[i % 32] * (i + seed) % len(WORDS)] for i in range(count))


def make_tokenizer(data_dir: Path, name: str = "b") -> Tokenizer:
    """A byte-level one that ends documents."""
    data_dir.mkdir(parents=True, exist_ok=True)
    (data_dir / "learn").write_text(text_of(500))
    trained = Tokenizer.train([data_dir / "learn"], "bpe", 300, special=(END,))
    add_tokenizer(data_dir, name, trained)
    return trained


def ids_of(data_dir: Path, manifest: DatasetManifest, split: Split) -> Ids:
    """All tokens of a split, as the files have them."""
    folder = dataset_folder(data_dir, manifest.name)
    found = [np.fromfile(folder / shard.file, manifest.stored) for shard in manifest.shards_of(split)]
    return np.concatenate([np.empty(0, manifest.stored), *found])
