"""Our `.cu` files become machine code at first use: NVRTC, our own headers, and nothing of a toolkit.

Rule 1: the result is machine code (a cubin) for exactly one architecture; no PTX is left for the driver to translate.
Rule 2: it is kept in a folder of the user, named by a hash of everything that it depends on: the source, the headers that it includes,
the defines, the architecture and NVRTC's version.
Rule 3: no GPU is needed, so that a machine without one can prove that every kernel compiles.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dcnr.backends.cupy.libraries import load_library
from dcnr.config import environment
from dcnr.errors import BackendUnavailable

SOURCES = Path(__file__).parent
OPTIONS = ("-std=c++17",)
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+\.cuh)"', re.MULTILINE)
REMEDY = "pip install nvidia-cuda-nvrtc (nvidia-cuda-nvrtc-cu12 with a driver for CUDA 12)"


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code, and what the compiler had to say (with `-Xptxas=-v`: registers and spills of each kernel)."""

    cubin: bytes
    log: str


def architecture(capability: int) -> str:
    """What to compile for: Hopper's own instructions on 9.0, else just the capability."""
    return "sm_90a" if capability == 90 else f"sm_{capability}"


def headers_of(text: str) -> dict[str, str]:
    """Every header of ours that `text` includes, directly or through another one, by name."""
    found: dict[str, str] = {}
    waiting = INCLUDE.findall(text)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = (SOURCES / name).read_text()
            waiting += INCLUDE.findall(found[name])
    return dict(sorted(found.items()))


@functools.cache
def cache_folder() -> Path | None:
    """Of this user: in XDG_CACHE_HOME, else in ~/.cache. None for a user without a home, for whom every process compiles again."""
    named = Path(environment().get("XDG_CACHE_HOME", ""))
    try:
        base = named if named.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "dcnr" / "cubins"


def load_cubin(source: str, defines: Sequence[str], arch: str) -> bytes:
    """Machine code of `<source>.cu` with `-D` each of `defines` for `arch`, from the cache if it is there.

    Raises `BackendUnavailable`, with the compiler's log, if it does not compile.
    """
    text = (SOURCES / f"{source}.cu").read_text()
    parts = (text, *headers_of(text).values(), *sorted(defines), *OPTIONS, arch, ".".join(map(str, nvrtc_version())))
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    folder = cache_folder()
    kept = folder and folder / f"{source}-{key[:32]}.cubin"
    found = kept and _kept(kept)
    if found:
        return found
    cubin = compile_source(source, defines, arch).cubin
    if kept:
        _keep(kept, cubin)
    return cubin


def compile_source(source: str, defines: Sequence[str], arch: str, *options: str) -> Compiled:
    """Compile `<source>.cu` now. Raises `BackendUnavailable`, with the compiler's log, if it does not compile."""
    text = (SOURCES / f"{source}.cu").read_text()
    flags = (f"-arch={arch}", *OPTIONS, *(f"-D{define}" for define in defines), *options)
    program = _Program(f"{source}.cu", text, headers_of(text))
    try:
        if not program.compile(flags):
            raise BackendUnavailable(
                f"{source}.cu does not compile for {arch} with {' '.join(defines) or 'no defines'}:\n{program.log()}",
                f"NVRTC here is {'.'.join(map(str, nvrtc_version()))}; if that is older than the GPU, install a newer one",
            )
        return Compiled(program.cubin(), program.log())
    finally:
        program.close()


def nvrtc_version() -> tuple[int, int]:
    """Major and minor. Raises `BackendUnavailable` where there is no NVRTC."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _kept(path: Path) -> bytes | None:
    """What was kept there; None if it is not whole: drivers do not refuse machine code that was cut off, they crash."""
    try:
        digest, cubin = path.read_bytes().split(b"\n", 1)
    except (OSError, ValueError):
        return None
    return cubin if digest == _digest(cubin) else None


def _digest(cubin: bytes) -> bytes:
    return hashlib.sha256(cubin).hexdigest().encode()


def _keep(kept: Path, cubin: bytes) -> None:
    """Write it, behind its digest; where the folder cannot be written, the next process compiles again."""
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=kept.parent)
        try:
            with open(handle, "wb") as file:
                file.write(_digest(cubin) + b"\n" + cubin)
            os.replace(name, kept)
        finally:
            Path(name).unlink(missing_ok=True)


class _Program:
    """One program of NVRTC."""

    def __init__(self, name: str, text: str, headers: dict[str, str]) -> None:
        self._lib = _nvrtc()
        self._handle = ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(headers))(*(header.encode() for header in headers.values()))
        names = (ctypes.c_char_p * len(headers))(*(header.encode() for header in headers))
        _check(self._lib.nvrtcCreateProgram(ctypes.byref(self._handle), text.encode(), name.encode(), len(headers), texts, names))

    def compile(self, flags: Sequence[str]) -> bool:
        """Whether it compiles."""
        return not self._lib.nvrtcCompileProgram(self._handle, len(flags), (ctypes.c_char_p * len(flags))(*(f.encode() for f in flags)))

    def log(self) -> str:
        """What the compiler said."""
        return self._read(self._lib.nvrtcGetProgramLogSize, self._lib.nvrtcGetProgramLog).rstrip(b"\0\n").decode(errors="replace")

    def cubin(self) -> bytes:
        """Machine code of a program that compiled."""
        return self._read(self._lib.nvrtcGetCUBINSize, self._lib.nvrtcGetCUBIN)

    def close(self) -> None:
        """Give it back."""
        _check(self._lib.nvrtcDestroyProgram(ctypes.byref(self._handle)))

    def _read(self, ask_size: Callable[..., int], ask: Callable[..., int]) -> bytes:
        size = ctypes.c_size_t()
        _check(ask_size(self._handle, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        _check(ask(self._handle, buffer))
        return buffer.raw


def _check(status: int) -> None:
    if status:
        name = _nvrtc().nvrtcGetErrorString
        name.restype = ctypes.c_char_p
        raise BackendUnavailable(f"NVRTC fails: {name(status).decode()}.", REMEDY)


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    return load_library("nvrtc", REMEDY)
