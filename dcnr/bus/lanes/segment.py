"""Memory that processes of one host share: mapped files on a RAM disk.

Not `multiprocessing.shared_memory`: until Python 3.13 its resource tracker unlinks a segment when any process that attached to it ends.
The owner holds a lock on the file for its life, so a file without one is the remains of a killed process, whatever its pid says. Those
are removed by whoever looks: each process of the host at its start, and when it learns that a peer is gone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

_NAME = re.compile(r"dcnr-[0-9]+-[0-9a-f]{8}")
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
_ATTEMPTS = 16
"""Whoever sweeps may take a file in the moment between its making and its lock; so often in a row is no chance."""
SHARE = 2
"""No segment takes more than this part (1 / 2) of what is free: several processes share it."""


def directory() -> Path:
    """Where segments lie: in memory on Linux, else in files that the page cache holds."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


class Segment:
    """One mapped file. Made by `create` (which also removes it) or `attach` (read-only, but for `control`, its first bytes)."""

    def __init__(self, name: str, memory: mmap.mmap, owned: bool, control: mmap.mmap | None = None) -> None:
        self.name = name
        self.memory = memory
        self.control = control
        self._owned = owned

    @property
    def exists(self) -> bool:
        """Whether its owner still uses it."""
        return (directory() / self.name).exists()

    def close(self) -> None:
        """Remove the file if it is ours, and unmap, at the latest when the last array over it is gone. Others keep their view."""
        if self._owned:
            (directory() / self.name).unlink(missing_ok=True)
        with suppress(BufferError):  # an array still lies in it
            self.memory.close()


def create(size: int, share: int = SHARE) -> Segment:
    """A segment with all its pages in place. Raises `OSError` unless `share` times as much is free.

    Writing to missing room would kill us by SIGBUS.
    """
    disk = os.statvfs(directory())
    if size * share > disk.f_bavail * disk.f_frsize:
        raise OSError(f"{directory()} has {disk.f_bavail * disk.f_frsize} bytes free; {size * share} are needed")
    name, fd = _new_file()
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
        # The mapping holds a duplicate of the descriptor, and with it the lock.
        return Segment(name, mmap.mmap(fd, size, flags=mmap.MAP_SHARED | _POPULATE), owned=True)
    except OSError:
        (directory() / name).unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _new_file() -> tuple[str, int]:
    """An empty file with our lock on it: its name and descriptor."""
    for _ in range(_ATTEMPTS):
        name = f"dcnr-{os.getpid()}-{secrets.token_hex(4)}"
        fd = os.open(directory() / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return name, fd
        os.close(fd)  # swept; its file is gone, or goes in this moment
    raise OSError(f"files in {directory()} are removed as soon as they are made")


def attach(name: str, control: int = 0) -> Segment:
    """Another process's segment, its first `control` bytes (whole pages) also for writing.

    Raises `OSError` if it cannot be opened here, `ValueError` if it is no segment's name or too short.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"'{name}' is no shared segment")
    fd = os.open(directory() / name, (os.O_RDWR if control else os.O_RDONLY) | os.O_NOFOLLOW)
    try:
        memory = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | _POPULATE, prot=mmap.PROT_READ)
        first = mmap.mmap(fd, control) if control else None
    finally:
        os.close(fd)
    return Segment(name, memory, owned=False, control=first)


def sweep() -> None:
    """Remove what killed processes left behind."""
    for path in directory().glob("dcnr-*"):
        if _NAME.fullmatch(path.name) is None:
            continue
        with suppress(OSError):  # another user's, or gone in this moment
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            finally:
                os.close(fd)
