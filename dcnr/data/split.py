"""Which tokens are for training and which for validation."""

from __future__ import annotations

from typing import Literal, get_args

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)


def split_by_tail(tokens: int, validation: float) -> tuple[int, int]:
    """(training tokens, validation tokens): the last `validation` (0 to below 1) of the stream is for validation, rounded up."""
    train = int(tokens * (1 - validation))
    return train, tokens - train
