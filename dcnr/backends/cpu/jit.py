"""How kernels are compiled, and where the machine code is kept.

Rule 1: a kernel is compiled for one fixed signature when its module is imported; nothing compiles in the middle of a step, and an
array of another type or layout is a TypeError instead of a second, silent compilation.
Rule 2: kernels are serial and release the GIL; threads are the caller's (one row shard each).
Rule 3: the fast-math flags leave NaN and infinity their meaning, because loss scaling detects overflows by them.
Rule 4: machine code is cached in a folder of the user named by a hash of all sources here. Numba itself looks only at the file of
the kernel, not at what the kernel calls, so without that hash a change in `functions.py` would leave stale kernels behind.
Rule 5: kernels run as the cache holds them, never as they were just compiled: in the process that compiles, a function that is not inlined
exists twice, optimised apart and so rounding differently. So a process of its own compiles, once a machine; all others wait, then load.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

from dcnr.errors import BackendUnavailable

F = TypeVar("F", bound=Callable[..., Any])
BACKEND = "dcnr.backends.cpu.backend"
"""Whoever imports it imports all kernels."""

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


def fill_cache(folder: Path, module: str = BACKEND) -> None:
    """Point Numba at `folder`, and let one process fill it by importing `module`; once it is complete nobody waits.

    Raises `BackendUnavailable` with what the compiler said.
    """
    settings.CACHE_DIR = str(folder)
    done = folder / f"complete-{settings.CPU_NAME or 'host'}"
    if done.exists():
        return
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _compile(module, folder)
            done.touch()


def _compile(module: str, folder: Path) -> None:
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import settings; settings.CACHE_DIR = {str(folder)!r}; import {module}"
    done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or [f"it ended with code {done.returncode}"]
        raise BackendUnavailable(f"The kernels of the cpu backend do not compile: {said[0]}", "Use --backend numpy, or install DCNR again.")
