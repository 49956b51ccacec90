"""What has to be compiled, and what the compiler says about it: registers and spills of each kernel.

Rule: the compiler is NVRTC, as in production, or nvcc where only that is there. Its words are kept in `build/ptxas` under a hash of all
that goes in, so that only what changed is compiled again.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest

from dcnr.backends.base import Array, Precision
from dcnr.backends.cupy.backend import BF16_CAPABILITY, CupyBackend
from dcnr.backends.cupy.compile import OPTIONS, SOURCES, architecture, compile_source, headers_of, nvrtc_version
from dcnr.backends.load import load_backend
from dcnr.errors import BackendUnavailable
from tests.backends import families
from tests.backends.cupy.dry import DryDevice, DryKernel, Variant
from tests.nodes.cases import CASES
from tests.nodes.runs import example, run

KEPT = Path(__file__).parents[3] / "build" / "ptxas"
CAPABILITIES = (80, 90)
SIZE = re.compile(r"(WIDTH|HEAD_DIM)=(\d+)")
"""A define that is a size. Of variants that differ in sizes alone, the largest stands for all: it needs the most registers."""
STORED: tuple[Precision, ...] = ("float32", "float16", "bfloat16")


class Usage(NamedTuple):
    """Of one kernel: registers of a thread, bytes that did not fit them."""

    registers: int
    spilled: int


class Unfilled(families.Given):
    """Inputs of which only shapes matter."""

    def numbers(self, *shape: int, scale: float = 1.0, precision: Precision | None = None) -> Array:
        """Not drawn: they may be larger than this machine."""
        return self.backend.empty(shape, precision or self.precision)


class Sizes(NamedTuple):
    """A network as people train it."""

    batch: int
    length: int
    heads: int
    head_dim: int
    features: int
    vocabulary: int


NETWORKS = (Sizes(128, 512, 8, 64, 2048, 32768), Sizes(128, 128, 8, 64, 2048, 10000), Sizes(64, 256, 6, 64, 1536, 65))
"""Topology 2, topology 1, shakespeare_char."""


def production(precision: Precision, capability: int) -> dict[DryKernel, int]:
    """The kernels of a training step of `NETWORKS`, with their blocks."""
    device = DryDevice(capability)
    for sizes in NETWORKS:
        given = Unfilled(CupyBackend(device), precision)
        rows, width = sizes.batch * sizes.length, sizes.heads * sizes.head_dim
        families.attention(given, sizes.batch, sizes.length, sizes.heads, sizes.head_dim)
        families.embedding(given, sizes.batch, sizes.length, sizes.vocabulary, width)
        families.norm(given, rows, width)
        families.residual(given, 0.1, rows, width)
        families.lm_head(given, rows, width, sizes.vocabulary)
        families.masks(given, rows, width)
        families.settled_step(given, (width * width, width, sizes.vocabulary * width))
        for kind in ("gelu", "swiglu", "silu", "relu"):
            families.linear(given, kind, rows, width, sizes.features)
    return device.launched


@cache
def everything(capability: int) -> Mapping[DryKernel, int]:
    """All kernels that the tests of the backend ask for, and those of production."""
    device, numpy = DryDevice(capability), load_backend("numpy")
    backend = CupyBackend(device)
    for precision in STORED if capability >= BF16_CAPABILITY else STORED[:2]:
        for one in CASES:
            run(backend, one, example(one, numpy), precision)
        for operation in families.SMALL.values():
            operation(Unfilled(backend, precision))
        device.launched |= production(precision, capability)
    return device.launched


def largest(kernels: Mapping[DryKernel, int]) -> dict[DryKernel, int]:
    """One variant of those that differ in sizes alone."""
    chosen: dict[tuple[str, ...], DryKernel] = {}
    for kernel in sorted(kernels, key=_sizes):
        rest = (SIZE.sub(r"\1", define) for define in kernel.variant.defines)
        chosen[kernel.variant.source, kernel.name, *rest] = kernel
    return {kernel: kernels[kernel] for kernel in chosen.values()}


def _sizes(kernel: DryKernel) -> list[int]:
    return [int(found[2]) for define in kernel.variant.defines if (found := SIZE.fullmatch(define))]


def usages(kernels: Mapping[DryKernel, int], capability: int) -> Iterator[tuple[DryKernel, Usage]]:
    """Compile them on all cores. Raises `BackendUnavailable` with the compiler's words, and skips the test where no compiler is."""
    variants = sorted({kernel.variant for kernel in kernels})
    with ThreadPoolExecutor(2) as threads:
        found = dict(zip(variants, threads.map(partial(_words, arch=architecture(capability)), variants), strict=True))
    for kernel in kernels:
        yield kernel, usage(found[kernel.variant], kernel.name)


def usage(words: str, name: str) -> Usage:
    """Of kernel `name`, as ptxas tells it."""
    part = re.split(r"Compiling entry function '", words)
    mine = next(text for text in part if text.startswith(f"{name}'"))
    stores, loads = re.findall(r"(\d+) bytes spill (?:stores|loads)", mine)[:2]
    (registers,) = re.findall(r"Used (\d+) registers", mine)
    return Usage(int(registers), int(stores) + int(loads))


def _words(variant: Variant, arch: str) -> str:
    text = (SOURCES / f"{variant.source}.cu").read_text()
    inputs = (text, *headers_of(text).values(), *variant.defines, *OPTIONS, arch, _compiler())
    kept = KEPT / f"{variant.source}-{hashlib.sha256(chr(0).join(inputs).encode()).hexdigest()[:24]}.txt"
    if not kept.exists():
        words = _by_nvcc(variant, arch) if _compiler() == "nvcc" else compile_source(*variant, arch, "--ptxas-options=-v").log
        KEPT.mkdir(parents=True, exist_ok=True)
        kept.write_text(words)
    return kept.read_text()


@cache
def _compiler() -> str:
    try:
        return f"nvrtc {nvrtc_version()}"
    except BackendUnavailable as error:
        if shutil.which("nvcc"):
            return "nvcc"
        pytest.skip(f"no compiler for NVIDIA GPUs here: {error}")


def _by_nvcc(variant: Variant, arch: str) -> str:
    code = f"arch=compute_{arch.removeprefix('sm_')},code={arch}"
    command = ["nvcc", "-cubin", f"-gencode={code}", *OPTIONS, "-Xptxas", "-v", *(f"-D{define}" for define in variant.defines)]
    source = str(SOURCES / f"{variant.source}.cu")
    done = subprocess.run([*command, source, "-o", "/dev/null"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BackendUnavailable(
            f"{variant.source}.cu does not compile for {arch} with {' '.join(variant.defines)}:\n{done.stderr}", "mend it"
        )
    return done.stderr
