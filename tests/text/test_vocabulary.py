"""The vocabulary file that a network names."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcnr.errors import NotFound, UserError
from dcnr.text.tokenizer import Tokenizer
from dcnr.text.vocabulary import load_vocabulary


def test_a_vocabulary_must_not_be_larger_than_the_network_says(tmp_path: Path) -> None:
    """Smaller is fine: an embedding may have rows to spare."""
    (tmp_path / "text").write_text("abc abd abe")
    tokenizer = Tokenizer.train([tmp_path / "text"], kind="char")
    tokenizer.save(tmp_path / "tokenizer.json")
    path = str(tmp_path / "tokenizer.json")
    for size in (None, tokenizer.vocab_size, tokenizer.vocab_size + 1):
        assert load_vocabulary(path, size).vocab_size == tokenizer.vocab_size
    with pytest.raises(UserError, match=f"holds {tokenizer.vocab_size} tokens, more than the vocab_size of 3"):
        load_vocabulary(path, 3)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """With its path."""
    with pytest.raises(NotFound, match="nowhere"):
        load_vocabulary(str(tmp_path / "nowhere"), None)
