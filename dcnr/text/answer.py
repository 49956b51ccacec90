"""What may be shown of a text that is still being generated.

Rule 1: a character whose bytes are not all there yet is held back, and so is what may become a stop text. Shown text is never taken back.
Rule 2: the stop text that is complete first, and what follows it, are not part of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

INCOMPLETE = "\ufffd"
"""What bytes decode to that are no UTF-8, or not yet."""


def said(text: str, stops: Sequence[str], done: bool) -> str:
    """As much of `text` as is certain; all of it, up to a stop text, when it is `done`."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        return text[: min(found)[1]]
    if done:
        return text
    text = text.rstrip(INCOMPLETE)
    return text[: len(text) - max((_begun(text, stop) for stop in stops), default=0)]


def _begun(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` begins with."""
    return next((length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0)
