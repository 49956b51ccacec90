"""The vocabulary file that a network names."""

from __future__ import annotations

from pathlib import Path

from dcnr.errors import UserError
from dcnr.text.tokenizer import Tokenizer


def load_vocabulary(path: str, size: int | None) -> Tokenizer:
    """The tokenizer at `path`. Raises `UserError` if it holds more than `size` tokens."""
    found = Tokenizer.load(Path(path))
    if size is not None and found.vocab_size > size:
        message = f"{path} holds {found.vocab_size} tokens, more than the vocab_size of {size}"
        raise UserError(message, f"set vocab_size to {found.vocab_size}")
    return found
