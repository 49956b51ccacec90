"""Datasets of ids that are there already: of another dataset, cut anew, or of files that another tool wrote.

Rule: ids stay as they are; what is not in the tokenizer's vocabulary is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from dcnr.data.making import FINAL, finish, making
from dcnr.data.manifest import (
    DatasetManifest,
    Shard,
    check_free,
    dataset_folder,
    dtype_for,
    read_manifest,
    stored,
    unfinished_folder,
)
from dcnr.data.shards import Shelf, TokenStream, blocks, map_ids, write_shards
from dcnr.data.split import SPLITS, Split, SplitRule, check_length
from dcnr.errors import UserError
from dcnr.text.tokenizer import fingerprint, open_tokenizer


def derive_dataset(
    data_dir: Path, name: str, parent: str, rule: SplitRule, seq_len: int | None = None, tokens: int | None = None
) -> DatasetManifest:
    """Dataset `name` of the tokens of `parent`, training before validation, or of the first `tokens` of them, split by `rule`."""
    rule.check()
    if not (rule.of_tokens or rule.strategy == "kfold"):
        raise UserError(f"tokens cannot be split by {rule.strategy}", "use tail, windows or kfold, or create the dataset of its text again")
    folder, old = check_free(data_dir, name), read_manifest(data_dir, parent)
    tokenizer = open_tokenizer(data_dir, old.tokenizer)
    shelf, seq_len = Shelf(dataset_folder(data_dir, parent), old, None), seq_len or old.seq_len
    stream = shelf.whole()
    spans = rule.spans(min(len(stream), tokens or len(stream)), seq_len)
    with making(unfinished_folder(data_dir, name)) as work:
        shards, splits = write_shards(work / FINAL, blocks(stream, spans), old.stored, tokenizer.token_bytes())
        check_length(name, "train", splits["train"].tokens, seq_len)
        whole = tokens is None or tokens >= len(stream)
        manifest = replace(
            old,
            name=name,
            parent=parent,
            seq_len=seq_len,
            strategy=str(rule),
            splits=splits,
            shards=shards,
            documents=old.documents if whole else 0,
        )
        finish(work, folder, manifest)
    return manifest


def import_ids(data_dir: Path, name: str, files: Mapping[Split, Sequence[Path]], tokenizer_name: str, seq_len: int) -> DatasetManifest:
    """Dataset `name` of files of raw little-endian ids, as nanoGPT writes them: uint16, or uint32 for a vocabulary above 65,536."""
    folder = check_free(data_dir, name)
    tokenizer = open_tokenizer(data_dir, tokenizer_name)
    dtype = dtype_for(tokenizer.vocab_size)
    streams = {split: _raw_stream(split, files.get(split, ()), stored(dtype).itemsize) for split in SPLITS}
    with making(unfinished_folder(data_dir, name)) as work:
        found = chain.from_iterable(blocks(stream, [(0, len(stream), split)]) for split, stream in streams.items())
        shards, splits = write_shards(work / FINAL, found, stored(dtype), tokenizer.token_bytes())
        check_length(name, "train", splits["train"].tokens, seq_len)
        manifest = DatasetManifest(
            name=name,
            tokenizer=tokenizer_name,
            tokenizer_sha256=fingerprint(data_dir, tokenizer_name),
            vocab_size=tokenizer.vocab_size,
            dtype=dtype,
            seq_len=seq_len,
            strategy="given",
            splits=splits,
            shards=shards,
            sources=tuple(os.path.abspath(file) for split in SPLITS for file in files.get(split, ())),
            files=sum(map(len, files.values())),
        )
        finish(work, folder, manifest)
    return manifest


def _raw_stream(split: Split, files: Sequence[Path], itemsize: int) -> TokenStream:
    found = []
    for file in files:
        size = file.stat().st_size
        if size % itemsize:
            raise UserError(f"{file} has {size} bytes, which are no whole ids of {itemsize} bytes", "give raw ids as the vocabulary needs")
        if size:
            found.append(Shard(str(file), split, size // itemsize, ""))
    kind = stored("uint16" if itemsize == 2 else "uint32")
    return TokenStream(found, lambda shard: map_ids(Path(shard.file), kind))
