"""The process that ends a cluster's children when the command that started them was killed.

It reads `+PID` and `-PID` lines (process groups that live, or were reaped) from its parent. At end of file, which comes however the
parent ended, it ends every group that is left: first a request, two seconds later by force. It holds the lock of the data directory
meanwhile, so no new cluster starts over the remains of the old one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

PATIENCE = 2.0
"""Seconds between the request to end and the force."""


def read_groups(lines: Iterable[str]) -> set[int]:
    """The process groups that are left when `lines` end."""
    groups: set[int] = set()
    for line in lines:
        sign, pid = line[0], int(line[1:])
        if sign == "+":
            groups.add(pid)
        else:
            groups.discard(pid)
    return groups


def end_groups(groups: Iterable[int], patience: float) -> None:
    """End process groups; those that are still there after `patience` seconds by force."""
    waiting = {group for group in groups if _signal(group, signal.SIGTERM)}
    until = time.monotonic() + patience
    while waiting and time.monotonic() < until:
        time.sleep(0.05)
        waiting = {group for group in waiting if _signal(group, 0)}
    for group in waiting:
        _signal(group, signal.SIGKILL)


def _signal(group: int, number: int) -> bool:
    """Whether there was anyone to signal."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        return True
    return False


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_groups(read_groups(sys.stdin), PATIENCE)
