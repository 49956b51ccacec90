"""From a text to the tokenizer and dataset that a network needs, made once for each content.

Rule 1: the name is a hash of what decides the result (the files' bytes and formats, vocabulary size, sequence length), so a second run
finds them.
Rule 2: a network with a vocabulary of at most 256 reads characters, a larger one byte-level BPE.
Rule 3: if the dataset cannot be made, the tokenizer made for it goes too.
Rule 4: what takes long happens beside the loop, so that Ctrl-C is heard at once.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from dcnr.cli.client import beside_loop
from dcnr.cli.output import OnProgress, progress, tell_skipped
from dcnr.data.create import Recipe, create_dataset
from dcnr.data.manifest import VERSION, DatasetManifest, has_dataset, unfinished_folder
from dcnr.errors import UserError
from dcnr.network.graph import Graph
from dcnr.nodes.embedding import EmbedderConfig
from dcnr.text.documents import Reading
from dcnr.text.preprocess import find_files
from dcnr.text.tokenizer import MIN_BPE_VOCABULARY, Kind, Tokenizer, add_tokenizer, delete_tokenizer, list_tokenizers


async def prepare_text(data_dir: Path, sources: Sequence[str], graph: Graph) -> str:
    """The name of a dataset of `sources` (files, folders, globs) that fits `graph`.

    Raises `UserError` for a text that is missing, empty, too short or not UTF-8.
    """
    vocab_size, seq_len = _needs(graph)
    found = await beside_loop(lambda _: find_files(sources))
    tell_skipped(found.skipped)
    name = await beside_loop(lambda _: f"text-{_hash(found.files, vocab_size, seq_len)}")
    if has_dataset(data_dir, name):
        return name
    made = name not in list_tokenizers(data_dir)
    if made:
        await _learn_tokenizer(data_dir, name, found.files, vocab_size)

    def tokenise(on_progress: OnProgress) -> DatasetManifest:
        return create_dataset(data_dir, name, sources, name, Recipe(seq_len), on_progress)

    try:
        with progress("tokenising") as show:
            await beside_loop(tokenise, show)
    except BaseException:
        if made:
            delete_tokenizer(data_dir, name)
            shutil.rmtree(unfinished_folder(data_dir, name), ignore_errors=True)
        raise
    return name


async def _learn_tokenizer(data_dir: Path, name: str, files: Sequence[Path], vocab_size: int) -> None:
    kind: Kind = "char" if vocab_size <= MIN_BPE_VOCABULARY else "bpe"
    with progress("learning a tokenizer") as show:
        trained = await beside_loop(lambda on_progress: Tokenizer.train(files, kind, vocab_size, on_progress), show)
    add_tokenizer(data_dir, name, trained)


def _needs(graph: Graph) -> tuple[int, int]:
    """(vocabulary size, sequence length) of the embedder."""
    for node in graph.nodes:
        if isinstance(node.config, EmbedderConfig):
            return node.config.vocab_size, node.input_shapes[0][0]
    raise UserError(f"network '{graph.name}' has no embedder, so it cannot read text", "use a network that has one")


def _hash(files: Sequence[Path], vocab_size: int, seq_len: int) -> str:
    digest = hashlib.sha256(f"{VERSION} {vocab_size} {seq_len}".encode())
    for file in files:
        digest.update(Reading().of(file).encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:12]
