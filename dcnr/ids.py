"""The identifiers that travel: one type each, and the one rule they all obey."""

from __future__ import annotations

import re
from typing import NewType

from dcnr.errors import UserError

NetworkId = NewType("NetworkId", str)
NodeId = NewType("NodeId", str)
PNodeId = NewType("PNodeId", str)
SessionId = NewType("SessionId", str)

Epoch = NewType("Epoch", int)
"""Number of an assignment; it only grows, and messages of an older one are dropped."""
NEVER = Epoch(0)
"""Before every epoch: of what was never deployed."""

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
ID_RULE = "1 to 64 letters, digits, '_' or '-'"


def is_id(text: str) -> bool:
    """Whether `text` may stand in a NATS subject and a file name."""
    return _ID.fullmatch(text) is not None


def check_id(text: str, what: str) -> str:
    """Return `text`, or raise `UserError` that names `what` was being named."""
    if not is_id(text):
        raise UserError(f"'{text}' is not a valid {what} name", f"use {ID_RULE}")
    return text
