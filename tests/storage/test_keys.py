"""Storage keys."""

from __future__ import annotations

import pytest

from dcnr.errors import UserError
from dcnr.storage.keys import check_key, check_prefix, is_key

ESCAPES = ["../a", "a/../b", "/a", "a//b", "./a", "a/.b", ".a", "a\\b", "a b", "a\n", "a\0"]


@pytest.mark.parametrize("key", ["a", "a/b.c", "checkpoints/run-1/0000000010/p_1.3.safetensors"])
def test_plain_keys_pass(key: str) -> None:
    """As they are, as keys and as prefixes."""
    assert check_key(key) == key
    assert is_key(key)
    assert check_prefix(key) == key
    assert check_prefix(key + "/") == key + "/"


@pytest.mark.parametrize("key", ["", "a/", *ESCAPES])
def test_other_keys_are_refused(key: str) -> None:
    """Whatever could leave the root, hide, or mean two things."""
    with pytest.raises(UserError, match="is not a storage key"):
        check_key(key)
    assert not is_key(key)


@pytest.mark.parametrize("prefix", ESCAPES)
def test_a_prefix_that_no_key_has_is_refused(prefix: str) -> None:
    """So that nothing outside is listed or deleted."""
    with pytest.raises(UserError, match="no storage key starts with"):
        check_prefix(prefix)


def test_an_empty_prefix_is_everything() -> None:
    """It is the beginning of every key."""
    assert check_prefix("") == ""
