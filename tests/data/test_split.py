"""Splits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcnr.data.split import split_by_tail


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
