"""From a text to the tokenizer and dataset that a network needs, made once for each content.

Rule 1: the name is a hash of what decides the result (the text's bytes, vocabulary size, sequence length), so a second run finds them.
Rule 2: a network with a vocabulary of at most 256 reads characters, a larger one byte-level BPE.
Rule 3: if the dataset cannot be made, the tokenizer made for it goes too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from dcnr.cli.output import progress
from dcnr.data.dataset import Dataset, list_datasets
from dcnr.errors import UserError
from dcnr.network.graph import Graph
from dcnr.nodes.embedding import EmbedderConfig
from dcnr.text.tokenizer import MIN_BPE_VOCABULARY, Kind, Tokenizer, add_tokenizer, delete_tokenizer, list_tokenizers


def prepare_text(data_dir: Path, files: Sequence[Path], graph: Graph) -> str:
    """The name of a dataset of `files` that fits `graph`. Raises `UserError` for a text that is empty, too short or not UTF-8."""
    vocab_size, seq_len = _needs(graph)
    name = f"text-{_hash(files, vocab_size, seq_len)}"
    if any(dataset.name == name for dataset in list_datasets(data_dir)):
        return name
    made = name not in list_tokenizers(data_dir)
    if made:
        kind: Kind = "char" if vocab_size <= MIN_BPE_VOCABULARY else "bpe"
        with progress("learning a tokenizer") as on_progress:
            add_tokenizer(data_dir, name, Tokenizer.train(files, kind, vocab_size, on_progress))
    try:
        with progress("tokenising") as on_progress:
            Dataset.create(data_dir, name, files, name, seq_len=seq_len, on_progress=on_progress)
    except BaseException:
        if made:
            delete_tokenizer(data_dir, name)
        raise
    return name


def _needs(graph: Graph) -> tuple[int, int]:
    """(vocabulary size, sequence length) of the embedder."""
    for node in graph.nodes:
        if isinstance(node.config, EmbedderConfig):
            return node.config.vocab_size, node.input_shapes[0][0]
    raise UserError(f"network '{graph.name}' has no embedder, so it cannot read text", "use a network that has one")


def _hash(files: Sequence[Path], vocab_size: int, seq_len: int) -> str:
    digest = hashlib.sha256(f"{vocab_size} {seq_len}".encode())
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:12]
