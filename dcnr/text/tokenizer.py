"""Text to token ids and back, on the `tokenizers` library: byte-level BPE and character level.

Rule 1: a tokenizer is one `tokenizer.json` of the library, so other tools read it too. A data directory keeps it in `tokenizers/<name>/`.
Rule 2: decode(encode(text)) == text, for every text. A character that a character-level tokenizer has never seen is an error.
Rule 3: training streams: neither text nor token ids of a whole file are ever in memory.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from dcnr.errors import AlreadyExists, NotFound, UserError
from dcnr.ids import check_id
from dcnr.text.preprocess import read_pieces, total_bytes

Kind = Literal["bpe", "char"]
OnProgress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all)."""


def no_progress(done: int, total: int) -> None:
    """For who does not want to know."""


MIN_BPE_VOCABULARY = 256
MAX_VOCABULARY = 1 << 18
DEFAULT_VOCABULARY = 8192


class Tokenizer:
    """A trained tokenizer."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        self._characters = frozenset(library.get_vocab()) if self.kind == "char" else None

    @classmethod
    def train(
        cls, files: Sequence[Path], kind: Kind = "bpe", vocab_size: int = DEFAULT_VOCABULARY, on_progress: OnProgress = no_progress
    ) -> Tokenizer:
        """Learn from `files`. BPE (Sennrich et al. 2016, over bytes) may end with fewer than `vocab_size` tokens if the text is short.

        At character level the vocabulary is every character of the text, by code point, and must not exceed `vocab_size`.
        """
        if vocab_size > MAX_VOCABULARY or (kind == "bpe" and vocab_size < MIN_BPE_VOCABULARY):
            raise UserError(f"a vocabulary of {vocab_size} is not possible", f"use {MIN_BPE_VOCABULARY} to {MAX_VOCABULARY}")
        if total_bytes(files) == 0:
            raise UserError("the text is empty", "give files with text in them")
        pieces = _counted(files, on_progress)
        return cls(_train_bpe(pieces, vocab_size) if kind == "bpe" else _train_characters(pieces, vocab_size))

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a `tokenizer.json`."""
        if not path.is_file():
            raise NotFound(f"there is no tokenizer at {path}", "train one with `dcnr tokenizer train`")
        return cls.parse(path.read_bytes(), str(path))

    @classmethod
    def parse(cls, data: bytes, where: str) -> Tokenizer:
        """The tokenizer of a `tokenizer.json` that was read from `where`."""
        try:
            return cls(tokenizers.Tokenizer.from_buffer(data))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{where} is not a tokenizer.json: {error}", "train it again") from error

    def to_json(self) -> str:
        """The text of its `tokenizer.json`: equal for equal tokenizers."""
        return str(self._library.to_str(pretty=True))

    def save(self, path: Path) -> None:
        """Write `path` whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            temporary.write_text(self.to_json(), encoding="utf-8", newline="\n")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    @property
    def kind(self) -> str:
        """`bpe` or `char` (or the library's name of another model)."""
        name = type(self._library.model).__name__
        return {"BPE": "bpe", "WordLevel": "char"}.get(name, name)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return int(self._library.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises `UserError` if the tokenizer does not know it."""
        self.check(text)
        return [int(token) for token in self.encode_batch([text])[0]]

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Token ids of each text, all of which `check` accepts. The library uses all cores."""
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def check(self, text: str) -> None:
        """Raise `UserError` if `text` has what this tokenizer cannot encode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"character {error.start} of the text is half a surrogate pair", "give valid UTF-8 text") from error
        if self._characters is not None and (unknown := set(text) - self._characters):
            first = min(unknown, key=text.index)
            raise UserError(
                f"the tokenizer does not know {first!r} (U+{ord(first):04X})",
                "train it on text that has it, or use a bpe tokenizer, which knows every byte",
            )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`. Bytes that are no UTF-8 (a generated sequence may have them) become U+FFFD."""
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise UserError(f"token id {wrong} is not in the vocabulary", f"ids are 0 to {self.vocab_size - 1}")
        return str(self._library.decode(list(ids), skip_special_tokens=False))


def _counted(files: Sequence[Path], on_progress: OnProgress) -> Iterator[str]:
    """The pieces of all files."""
    total, done = total_bytes(files), 0
    for file in files:
        for piece in read_pieces(file):
            yield piece
            done += len(piece.encode())
            on_progress(done, total)


def _train_bpe(pieces: Iterator[str], vocab_size: int) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(pieces, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False))
    return library


def _train_characters(pieces: Iterator[str], vocab_size: int) -> tokenizers.Tokenizer:
    characters: set[str] = set()
    for piece in pieces:
        characters.update(piece)
    if len(characters) > vocab_size:
        raise UserError(
            f"the text has {len(characters)} different characters, more than the vocabulary of {vocab_size}",
            "raise the vocabulary size or use a bpe tokenizer",
        )
    library = tokenizers.Tokenizer(models.WordLevel({character: index for index, character in enumerate(sorted(characters))}))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    library.decoder = decoders.Fuse()
    return library


# -- tokenizers of a data directory ------------------------------------------------------------------------------------


def tokenizer_path(data_dir: Path, name: str) -> Path:
    """Where the tokenizer `name` is kept."""
    return data_dir / "tokenizers" / check_id(name, "tokenizer") / "tokenizer.json"


def list_tokenizers(data_dir: Path) -> list[str]:
    """Names, sorted."""
    return sorted(path.parent.name for path in (data_dir / "tokenizers").glob("*/tokenizer.json"))


def open_tokenizer(data_dir: Path, name: str) -> Tokenizer:
    """Load the tokenizer `name`."""
    path = tokenizer_path(data_dir, name)
    if not path.exists():
        known = ", ".join(list_tokenizers(data_dir)) or "none"
        raise NotFound(f"there is no tokenizer '{name}' (there are: {known})", "train one with `dcnr tokenizer train`")
    return Tokenizer.load(path)


def add_tokenizer(data_dir: Path, name: str, tokenizer: Tokenizer) -> Path:
    """Keep `tokenizer` as `name`; returns its file."""
    path = check_free(data_dir, name)
    tokenizer.save(path)
    return path


def check_free(data_dir: Path, name: str) -> Path:
    """The path of a tokenizer that does not exist yet; raises `AlreadyExists`. Ask before training for minutes."""
    path = tokenizer_path(data_dir, name)
    if path.exists():
        raise AlreadyExists(f"there is a tokenizer '{name}' already", "choose another name or delete it first")
    return path


def delete_tokenizer(data_dir: Path, name: str) -> None:
    """Remove the tokenizer `name`."""
    open_tokenizer(data_dir, name)
    shutil.rmtree(tokenizer_path(data_dir, name).parent)


def fingerprint(data_dir: Path, name: str) -> str:
    """sha256 of the tokenizer's file: data made with one tokenizer is not read with another."""
    return hashlib.sha256(tokenizer_path(data_dir, name).read_bytes()).hexdigest()
