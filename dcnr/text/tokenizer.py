"""Text to token ids and back, on the `tokenizers` library: byte-level BPE and character level.

Rule 1: a tokenizer is one `tokenizer.json` of the library, so other tools read it too. A data directory keeps it in `tokenizers/<name>/`.
Rule 2: decode(encode(text)) == text, for every text. A character that a character-level tokenizer has never seen is an error, and what
cannot keep this promise is not imported.
Rule 3: training streams: neither text nor token ids of a whole file are ever in memory.
Rule 4: a special token stands for no text: text that looks like one is encoded as any other. They have the last ids.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, takewhile
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from dcnr.errors import AlreadyExists, NotFound, UserError
from dcnr.ids import check_id
from dcnr.text.documents import Reading, read_texts
from dcnr.text.preprocess import cut_pieces, total_bytes

Kind = Literal["bpe", "char"]
OnProgress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all)."""


def no_progress(done: int, total: int) -> None:
    """For who does not want to know."""


MIN_BPE_VOCABULARY = 256
MAX_VOCABULARY = 1 << 18
DEFAULT_VOCABULARY = 8192

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>")
"""Special tokens that end a document; the first that a tokenizer has is the one."""

_HARD = (" a\n\tb\r\nc\0 d  e.\n\n   f \u00e9 e\u0301 😀 👩\u200d👧 \ufeff 中文 'll don't 123456 x;\n}\n", "X")
"""What an imported tokenizer must give back, and piece by piece too."""
_CODES = (*range(0x801), *range(0x1000, 0x10000, 0x1000), 0x10000, *range(0x40000, 0x110000, 0x40000))
_EVERY_BYTE = "".join(chr(code) for code in _CODES if not 0xD800 <= code < 0xE000)
"""A text with every byte that UTF-8 has."""


class Tokenizer:
    """A trained tokenizer. Ids are 0 to below `vocab_size`."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        library.encode_special_tokens = True  # as text: see rule 4
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._added = library.get_added_tokens_decoder()
        self.vocab_size = max(library.get_vocab().values(), default=-1) + 1
        self._codes = _code_table(library) if self.kind == "char" else None

    @classmethod
    def train(
        cls,
        files: Sequence[Path],
        kind: Kind = "bpe",
        vocab_size: int = DEFAULT_VOCABULARY,
        on_progress: OnProgress = no_progress,
        special: Sequence[str] = (),
        reading: Reading = Reading(),  # noqa: B008  it never changes
    ) -> Tokenizer:
        """Learn from `files`. BPE (Sennrich et al. 2016, over bytes) may end with fewer than `vocab_size` tokens if the text is short.

        At character level the vocabulary is every character of the text, by code point. Both leave room for the `special` tokens within
        `vocab_size`.
        """
        least = (MIN_BPE_VOCABULARY if kind == "bpe" else 1) + len(special)
        if not least <= vocab_size <= MAX_VOCABULARY:
            raise UserError(f"a vocabulary of {vocab_size} is not possible", f"use {least} to {MAX_VOCABULARY}")
        wrong = next((token for token in special if len(token) < 2 or special.count(token) > 1), None)
        if wrong is not None:
            raise UserError(f"'{wrong}' cannot be a special token", "give each once, of two characters or more, such as <|endoftext|>")
        pieces = _counted(files, reading, on_progress)
        first = next(pieces, None)
        if first is None:
            raise UserError("the text is empty", "give files with text in them")
        room = vocab_size - len(special)
        library = (_train_bpe if kind == "bpe" else _train_characters)(chain([first], pieces), room)
        learned = next((token for token in special if library.token_to_id(token) is not None), None)
        if learned is not None:
            raise UserError(f"'{learned}' cannot be a special token: the tokenizer has learned it from the text", "choose another one")
        library.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in special])
        return cls(library)

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

    def check_lossless(self) -> None:
        """Raise `UserError` unless this is a tokenizer of the kinds that keep rule 2, and does so with a few hard texts."""
        remedy = "import a byte-level BPE tokenizer without a normalizer, such as GPT-2's or Llama 3's, or one made here"
        if self.kind not in ("bpe", "char") or (self.kind == "bpe" and type(self._library.decoder).__name__ != "ByteLevel"):
            raise UserError(f"a tokenizer of kind {self.kind} that is not byte-level cannot give every text back", remedy)
        if self._codes is not None:
            self._check_gives_back("".join(chr(code) * 2 for code in np.flatnonzero(self._codes >= 0)), remedy)
            return
        if self._library.model.dropout:
            raise UserError("the tokenizer encodes a text differently every time (dropout)", "set its dropout to null")
        for text in (*_HARD, _EVERY_BYTE, *(f" {added.content}  b" for added in self._added.values())):
            self._check_gives_back(text, remedy)
        for text in _HARD:
            if [token for piece in cut_pieces([*text]) for token in self.encode(piece)] != self.encode(text):
                raise UserError("the tokenizer joins words with the blanks behind them, so that text cannot be streamed to it", remedy)

    def _check_gives_back(self, text: str, remedy: str) -> None:
        found = self.decode(self.encode(text))
        if found != text:
            same = (one == other for one, other in zip(text, found, strict=False))
            at = sum(takewhile(bool, same))
            raise UserError(f"the tokenizer changes text: {text[at : at + 20]!r} comes back as {found[at : at + 20]!r}", remedy)

    def save(self, path: Path) -> None:
        """Write `path` whole or not at all."""
        _write(path, self.to_json().encode())

    @property
    def kind(self) -> str:
        """`bpe` or `char` (or the library's name of another model)."""
        name = type(self._library.model).__name__
        return {"BPE": "bpe", "WordLevel": "char"}.get(name, name)

    @property
    def special(self) -> dict[str, int]:
        """The special tokens and their ids."""
        return {token.content: number for number, token in sorted(self._added.items()) if token.special}

    @property
    def end_id(self) -> int | None:
        """The id that ends a document, if there is one."""
        special = self.special
        return next((special[token] for token in END_TOKENS if token in special), None)

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """How many bytes of UTF-8 text each id stands for; special tokens for none."""
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in self._library.get_vocab().items():
            added = self._added.get(number)
            if added is not None:
                sizes[number] = 0 if added.special else len(token.encode())
            else:
                sizes[number] = len(token) if self.kind == "bpe" else len(token.encode())  # byte-level: a character stands for a byte
        return sizes

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises `UserError` if the tokenizer does not know it."""
        return [int(token) for token in self.encode_batch([text])[0]]

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Token ids of each text. The library uses all cores. Raises `UserError` for text that is not known, or is none."""
        try:
            if self._codes is not None:
                return [_encode_characters(text, self._codes) for text in texts]
            encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):  # the library says TypeError for the same
            for text in texts:
                _check_unicode(text)
            raise
        return [np.asarray(array("I", encoding.ids)) for encoding in encodings]  # three times as fast as from the list

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`. Bytes that are no UTF-8 (a generated sequence may have them) become U+FFFD."""
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise UserError(f"token id {wrong} is not in the vocabulary", f"ids are 0 to {self.vocab_size - 1}")
        return str(self._library.decode(list(ids), skip_special_tokens=False))


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"character {error.start} of the text is half a surrogate pair", "give valid UTF-8 text") from error


def _code_table(library: tokenizers.Tokenizer) -> npt.NDArray[np.int32]:
    """The id of each code point, -1 where there is none."""
    vocabulary = library.get_vocab(with_added_tokens=False)
    longer = next((token for token in vocabulary if len(token) != 1), None)
    if longer is not None:
        raise ValueError(f"its token '{longer}' is not one character")
    codes = np.full(max(map(ord, vocabulary), default=0) + 2, -1, dtype=np.int32)
    for character, number in vocabulary.items():
        codes[ord(character)] = number
    return codes


def _encode_characters(text: str, codes: npt.NDArray[np.int32]) -> npt.NDArray[np.uint32]:
    """What the library gives, by one look-up."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    found: npt.NDArray[np.int32] = codes[np.minimum(points, len(codes) - 1)]
    if len(found) and found.min() < 0:
        first = text[int(np.argmax(found < 0))]
        raise UserError(
            f"the tokenizer does not know {first!r} (U+{ord(first):04X})",
            "train it on text that has it, or use a bpe tokenizer, which knows every byte",
        )
    return found.view(np.uint32)


def _counted(files: Sequence[Path], reading: Reading, on_progress: OnProgress) -> Iterator[str]:
    """The pieces of all files."""
    total, done = total_bytes(files), 0
    for piece in read_texts(files, reading):
        yield piece
        done += len(piece.encode())
        on_progress(min(done, total), total)
    on_progress(total, total)


def _train_bpe(pieces: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(pieces, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False))
    return library


def _train_characters(pieces: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
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


def import_tokenizer(data_dir: Path, name: str, path: Path) -> Path:
    """Keep the `tokenizer.json` at `path`, of whatever tool, as `name`, byte for byte."""
    kept = check_free(data_dir, name)
    Tokenizer.load(path).check_lossless()
    _write(kept, path.read_bytes())
    return kept


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
