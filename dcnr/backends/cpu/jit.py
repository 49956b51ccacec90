"""How kernels are compiled, and where the machine code is kept.

Rule 1: a kernel is compiled for one fixed signature when its module is imported; nothing compiles in the middle of a step, and an
array of another type or layout is a TypeError instead of a second, silent compilation.
Rule 2: kernels are serial and release the GIL; threads are the caller's (one row shard each).
Rule 3: the fast-math flags leave NaN and infinity their meaning, because loss scaling detects overflows by them.
Rule 4: machine code is cached in a folder of the user named by a hash of all sources here. Numba itself looks only at the file of
the kernel, not at what the kernel calls, so without that hash a change in `functions.py` would leave stale kernels behind.
Rule 5: of several processes that start at once on a fresh machine, one compiles and the others wait, then load.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])

njit: Any = numba.njit
settings: Any = numba.config
CACHE = Path(settings.CACHE_DIR or Path.home() / ".cache" / "dcnr")
"""Numba has read `$NUMBA_CACHE_DIR`."""

FLAGS = {"contract", "reassoc", "nsz", "arcp"}
OPTIONS = {"error_model": "numpy", "nogil": True, "boundscheck": False}


def kernel(signature: str) -> Callable[[F], F]:
    """Compile for `signature` (Numba's notation) now, or load the machine code from the cache."""
    compiled: Callable[[F], F] = njit(signature, cache=True, fastmath=FLAGS, **OPTIONS)
    return compiled


def inner(function: F) -> F:
    """A function that kernels call; inlined into them."""
    compiled: F = njit(fastmath=FLAGS, **OPTIONS)(function)
    return compiled


def exact(function: F) -> F:
    """Like `inner`, without re-association: for formulas whose order of operations carries their accuracy."""
    compiled: F = njit(fastmath={"contract"}, **OPTIONS)(function)
    return compiled


def cache_folder() -> Path:
    """The folder for the kernels of exactly these sources; made if missing.

    In `$NUMBA_CACHE_DIR`, else in `~/.cache/dcnr`; where that is not writable, a private folder for this process alone
    (a shared one in a public place would let another user plant machine code).
    """
    sources = hashlib.sha256(numba.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.read_bytes())
    folder = CACHE / f"kernels-{sources.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="dcnr-kernels-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="dcnr-kernels-"))


@contextmanager
def compiling(folder: Path) -> Iterator[None]:
    """Point Numba at `folder`, and let one process at a time fill it; once it is complete nobody waits."""
    settings.CACHE_DIR = str(folder)
    done = folder / f"complete-{settings.CPU_NAME or 'host'}"
    if done.exists():
        yield
        return
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        done.touch()
