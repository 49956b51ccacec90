"""Names of blobs, the same in every storage.

A key is path segments of letters, digits, `_`, `-` and `.`, none of them starting with a dot, joined by `/`: so none escapes its root.
A prefix is plain text, as in S3: whoever means a folder ends it with `/`.
"""

from __future__ import annotations

import re

from dcnr.errors import UserError

HALF_WRITTEN = 86_400.0
"""Seconds after which nobody can still be writing a blob that was begun."""

_SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"
_KEY = re.compile(f"{_SEGMENT}(/{_SEGMENT})*")
_PREFIX = re.compile(f"({_SEGMENT}/)*({_SEGMENT})?")


def check_key(key: str) -> str:
    """Return `key`, or raise `UserError` if it is not one."""
    if _KEY.fullmatch(key) is None:
        raise UserError(f"'{key}' is not a storage key", "use letters, digits, '_', '-', '.' and '/'; no part may start with '.'")
    return key


def is_key(text: str) -> bool:
    """Whether `text` can name a blob; other files in the same place are not ours."""
    return _KEY.fullmatch(text) is not None


def check_prefix(prefix: str) -> str:
    """Return `prefix`, or raise `UserError` if no key can start with it."""
    if _PREFIX.fullmatch(prefix) is None:
        raise UserError(f"no storage key starts with '{prefix}'")
    return prefix
