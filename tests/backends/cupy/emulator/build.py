"""Compiles kernels for the CPU: one shared library per source and set of defines, kept in `build/emulator` under a hash of its inputs.

Rule: several processes may build the same thing at once; each writes a file of its own and renames it.
CUDA that C++ cannot say is put differently before: `extern __shared__ T name[]` becomes a pointer to the emulator's shared memory.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

import dcnr.backends.cupy

KERNELS = Path(dcnr.backends.cupy.__file__).parent
EMULATOR = Path(__file__).parent
CACHE = Path(__file__).parents[4] / "build" / "emulator"
FLAGS = ("-std=c++17", "-O2", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-w")

_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
_DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[\];")


class BuildFailed(Exception):
    """A kernel is no C++; the message holds the compiler's words."""


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which("g++")


def library(source: Path, defines: Sequence[str], flags: Sequence[str] = ()) -> Path:
    """The shared library of `source` (a `.cu` file) compiled with `defines`; raises `BuildFailed`."""
    texts = _closure(source)
    runtime = _runtime()
    key = _key(*(f"{name}\n{text}" for name, text in sorted(texts.items())), *defines, *flags, runtime.name)
    result = CACHE / f"{source.stem}-{key}.so"
    if result.exists():
        return result
    with tempfile.TemporaryDirectory(prefix=f"{source.stem}-", dir=CACHE) as folder:
        for name, text in texts.items():
            Path(folder, name).write_text(_DYNAMIC_SHARED.sub(r"\1* const \2 = (\1*)emulator::shared;", text))
        options = [*flags, "-DEMULATED", *(f"-D{define}" for define in defines), f"-I{EMULATOR}", f"-Wl,-rpath,{CACHE}"]
        _compile([*options, "-x", "c++", str(Path(folder, source.name)), "-x", "none", str(runtime)], result)
    return result


@cache
def _runtime() -> Path:
    sources = [EMULATOR / "runtime.cpp", EMULATOR / "matrix.cpp"]
    headers = [EMULATOR / name for name in ("runtime.h", "emulator.h", "hopper.h")]
    CACHE.mkdir(parents=True, exist_ok=True)
    result = CACHE / f"libemulator-{_key(*(path.read_text() for path in [*sources, *headers]))}.so"
    if not result.exists():
        _compile(["-O3", *map(str, sources), f"-Wl,-soname,{result.name}"], result)
    return result


def _closure(source: Path) -> dict[str, str]:
    """The texts of a source and of all that it includes and that lies beside it."""
    texts: dict[str, str] = {}
    todo = [source]
    while todo:
        path = todo.pop()
        if not path.exists():
            path = KERNELS / path.name
        if path.name in texts or not path.exists():
            continue
        texts[path.name] = path.read_text()
        todo += [path.with_name(name) for name in _INCLUDE.findall(texts[path.name])]
    return texts


def _compile(arguments: Sequence[str], result: Path) -> None:
    found = compiler()
    if found is None:
        pytest.skip("no g++ here: install a C++ compiler to run kernels on the CPU")
    mine = result.with_name(f"{result.name}.{os.getpid()}.{threading.get_ident()}")
    done = subprocess.run([found, *FLAGS, *arguments, "-o", str(mine)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildFailed(f"{result.stem.split('-')[0]} does not compile for the emulator:\n{done.stderr[:6000]}")
    mine.rename(result)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join((*FLAGS, os.uname().machine, *parts)).encode()).hexdigest()[:16]
