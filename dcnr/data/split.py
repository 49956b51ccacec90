"""Which tokens are for training and which for validation.

Rule 1: a whole document, by hash of its text (`documents`, `kfold`) or of its file's name (`files`), stays where it is when text is added.
Rule 2: `tail` and `windows` cut the stream of all tokens: its end, or blocks drawn from the seed.
Rule 3: with `given`, what is for validation was named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from dcnr.errors import UserError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)

Strategy = Literal["tail", "documents", "files", "windows", "kfold", "given"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
OF_TOKENS: tuple[Strategy, ...] = ("tail", "windows", "kfold")
"""Those that can cut tokens, whose text and documents are not known."""

BLOCK_WINDOWS = 16
"""Windows of the sequence length in a block of `windows`: so few targets have a text before them that is not theirs."""

Span = tuple[int, int, Split]
"""Tokens from, to below, and whose they are."""


@dataclass(frozen=True, slots=True)
class SplitRule:
    """`validation`: the share that is for validation. `kfold` keeps fold `fold` (from 0) of `folds` for it instead."""

    strategy: Strategy = "tail"
    validation: float = 0.1
    seed: int = 0
    folds: int = 0
    fold: int = 0

    def check(self) -> None:
        """Raise `UserError` for what cannot be."""
        if not 0 <= self.validation < 1:
            raise UserError(f"validation {self.validation} is not possible", "use a share from 0 to below 1")
        if self.strategy == "kfold" and not (self.folds >= 2 and 0 <= self.fold < self.folds):
            raise UserError(f"fold {self.fold} of {self.folds} is not possible", "use 2 folds or more, and one of them from 0 on")

    def __str__(self) -> str:
        match self.strategy:
            case "kfold":
                return f"kfold, {self.fold} of {self.folds}"
            case "given":
                return "given"
            case "windows":
                return f"windows, {self.validation:g}, seed {self.seed}"
            case _:
                return f"{self.strategy}, {self.validation:g}"

    @property
    def of_documents(self) -> bool:
        """Whether it needs the digest of each document, whole."""
        return self.strategy in ("documents", "kfold")

    @property
    def of_tokens(self) -> bool:
        """Whether it cuts the stream of all tokens."""
        return self.strategy in ("tail", "windows")

    def split_of(self, digest: bytes) -> Split:
        """Of a document or file with this digest, for the rules that go by one."""
        number = int.from_bytes(digest[:8], "big")
        ours = number % self.folds == self.fold if self.strategy == "kfold" else number < self.validation * 2**64
        return "validation" if ours else "train"

    def spans(self, tokens: int, seq_len: int) -> Iterator[Span]:
        """The whole stream of so many tokens, in order, for the rules that cut it; `kfold` can, where documents are not known."""
        if self.strategy == "tail":
            train, _ = split_by_tail(tokens, self.validation)
            yield from (span for span in ((0, train, "train"), (train, tokens, "validation")) if span[0] < span[1])
            return
        size = BLOCK_WINDOWS * seq_len
        blocks = -(-tokens // size)
        order = np.random.Generator(np.random.Philox(key=self.seed)).permutation(blocks)
        ours = order % self.folds == self.fold if self.strategy == "kfold" else order < round(blocks * self.validation)
        for block in range(blocks):
            yield block * size, min((block + 1) * size, tokens), "validation" if ours[block] else "train"


def split_by_tail(tokens: int, validation: float) -> tuple[int, int]:
    """(training tokens, validation tokens): the last `validation` (0 to below 1) of the stream is for validation, rounded up."""
    train = int(tokens * (1 - validation))
    return train, tokens - train


def check_length(name: str, split: Split, tokens: int, seq_len: int) -> None:
    """Raise `UserError` unless so many tokens hold a window of `seq_len` + 1."""
    if tokens > seq_len:
        return
    raise UserError(
        f"dataset '{name}': the {split} split has {tokens} tokens, a window of sequence length {seq_len} needs {seq_len + 1}",
        "give more text or a shorter sequence" if tokens else "give text that is not empty, or another share for validation",
    )
