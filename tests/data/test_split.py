"""Splits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcnr.data.split import BLOCK_WINDOWS, SplitRule, check_length, split_by_tail
from dcnr.errors import UserError
from dcnr.text.documents import digest_of


@settings(deadline=None)
@given(tokens=st.integers(0, 10**12), validation=st.floats(0, 1, exclude_max=True))
def test_every_token_is_in_one_split(tokens: int, validation: float) -> None:
    """Nothing lost, nothing twice, nothing negative."""
    train, rest = split_by_tail(tokens, validation)
    assert train + rest == tokens
    assert train >= 0
    assert rest >= 0


@pytest.mark.parametrize(("tokens", "validation", "train"), [(1_115_394, 0.1, 1_003_854), (10, 0.0, 10), (3, 0.5, 1), (0, 0.1, 0)])
def test_the_share_is_that_of_the_tail(tokens: int, validation: float, train: int) -> None:
    """The first is nanoGPT's published split of tiny Shakespeare."""
    assert split_by_tail(tokens, validation) == (train, tokens - train)


@settings(deadline=None)
@given(tokens=st.integers(0, 5000), seq_len=st.integers(1, 9), validation=st.floats(0, 1, exclude_max=True), seed=st.integers(0, 2**63 - 1))
def test_spans_are_the_whole_stream(tokens: int, seq_len: int, validation: float, seed: int) -> None:
    """In order, nothing lost, nothing twice; as many blocks for validation as the share says."""
    for rule in (SplitRule("tail", validation), SplitRule("windows", validation, seed), SplitRule("kfold", seed=seed, folds=3, fold=2)):
        spans = list(rule.spans(tokens, seq_len))
        assert [token for start, stop, _ in spans for token in range(start, stop)] == list(range(tokens))
    blocks = -(-tokens // (BLOCK_WINDOWS * seq_len))
    drawn = [split for _, _, split in SplitRule("windows", validation, seed).spans(tokens, seq_len)].count("validation")
    assert drawn == round(blocks * validation)


def test_windows_depend_on_the_seed_only() -> None:
    """The same again, and others with another."""
    spans = [list(SplitRule("windows", 0.5, seed).spans(10_000, 4)) for seed in (1, 1, 2)]
    assert spans[0] == spans[1] != spans[2]


def test_a_digest_decides_about_its_share() -> None:
    """Of many documents; and every one is for validation in exactly one fold."""
    digests = [digest_of(str(number).encode()) for number in range(2000)]
    share = sum(SplitRule("documents", 0.2).split_of(digest) == "validation" for digest in digests) / len(digests)
    assert 0.17 < share < 0.23
    folds = [SplitRule("kfold", folds=4, fold=fold) for fold in range(4)]
    assert all([rule.split_of(digest) for rule in folds].count("validation") == 1 for digest in digests)


@pytest.mark.parametrize(("tokens", "fits"), [(0, False), (1, False), (7, False), (8, False), (9, True)])
def test_a_window_takes_one_token_more_than_its_length(tokens: int, fits: bool) -> None:
    """0, 1, T - 1, T and T + 1 tokens."""
    if fits:
        check_length("d", "train", tokens, 8)
        return
    with pytest.raises(UserError, match=f"has {tokens} tokens, a window of sequence length 8 needs 9"):
        check_length("d", "train", tokens, 8)
