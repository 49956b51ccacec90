"""Where NVIDIA's shared libraries are, without a toolkit: the loader's path, or the wheels that come with CuPy.

Rule: newest first, and CUDA 12 as well as 13, since the driver decides which of them CuPy was installed for.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from dcnr.errors import BackendUnavailable

VERSIONS = (13, 12)
"""CUDA releases whose libraries we can use."""


def load_library(name: str, remedy: str) -> ctypes.CDLL:
    """`lib<name>.so`. Raises `BackendUnavailable` with `remedy` if there is none that loads."""
    tried = []
    for candidate in _candidates(name):
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            tried.append(str(error))
    raise BackendUnavailable(f"The CUDA library {name} is not to be found: {tried[-1] if tried else 'nowhere'}.", remedy)


def _candidates(name: str) -> Iterator[str]:
    """Wheels come first: they are what CuPy uses, and their version is the one that was chosen when it was installed."""
    for folder in _wheel_folders():
        for version in VERSIONS:
            yield from map(str, sorted(folder.glob(f"*/lib/lib{name}.so.{version}")))
    for version in VERSIONS:
        yield f"lib{name}.so.{version}"
    yield f"lib{name}.so"


def _wheel_folders() -> tuple[Path, ...]:
    """The `nvidia` folders of all site-packages on the path: wheels put `<part>/lib` there."""
    spec = importlib.util.find_spec("nvidia")
    return tuple(Path(place) for place in spec.submodule_search_locations or ()) if spec else ()
