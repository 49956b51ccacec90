"""Datasets of ids that are there already: of another dataset, cut anew, or of files that another tool wrote.

Rule: ids stay as they are; what is not in the tokenizer's vocabulary is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from dcnr.data.dataset import Dataset
from dcnr.data.making import FINAL, finish, making
from dcnr.data.manifest import DatasetManifest, Shard, check_free, dtype_for, stored, unfinished_folder
from dcnr.data.shards import TokenStream, blocks, map_ids, write_shards
from dcnr.data.split import OF_TOKENS, SPLITS, Split, SplitRule, check_length
from dcnr.errors import UserError
from dcnr.text.tokenizer import fingerprint, open_tokenizer


def derive_dataset(parent: Dataset, name: str, rule: SplitRule, seq_len: int | None = None, tokens: int | None = None) -> DatasetManifest:
    """Dataset `name` of the tokens of `parent`, training before validation, or of the first `tokens` of them, split by `rule`.

    The shards of `parent` that are not here are fetched: this must not be the thread of a loop.
    """
    rule.check()
    if rule.strategy not in OF_TOKENS:
        raise UserError(f"tokens cannot be split by {rule.strategy}", "use tail, windows or kfold, or create the dataset of its text again")
    old, folder, seq_len = parent.manifest, check_free(parent.data_dir, name), seq_len or parent.manifest.seq_len
    stream, token_bytes = parent.whole(), parent.tokenizer().token_bytes()
    spans = rule.spans(min(len(stream), tokens or len(stream)), seq_len)
    with making(unfinished_folder(parent.data_dir, name)) as work:
        shards, splits = write_shards(work / FINAL, blocks(stream, spans), old.stored, token_bytes)
        check_length(name, "train", splits["train"].tokens, seq_len)
        whole = tokens is None or tokens >= len(stream)
        manifest = replace(
            old,
            name=name,
            parent=old.name,
            seq_len=seq_len,
            strategy=str(rule) if rule.of_tokens else f"{rule} of blocks, seed {rule.seed}",
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
