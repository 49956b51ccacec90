"""How kernels are compiled and kept: architectures, headers, the cache, and what is said of a source that does not compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcnr.backends.cupy import compile as compiling
from dcnr.errors import BackendUnavailable

HEADER = "#pragma once\n#define VALUE 1\n"
KERNEL = '#include "value.cuh"\nextern "C" __global__ void set(int* p) { *p = VALUE; }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one kernel and a header, and an empty cache."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "value.cuh").write_text(HEADER)
    (folder / "set.cu").write_text(KERNEL)
    monkeypatch.setattr(compiling, "SOURCES", folder)
    monkeypatch.setattr(compiling, "CACHE", tmp_path / "cache" / "cubins")
    return folder


def kept() -> list[Path]:
    """What is in the cache."""
    return sorted(compiling.CACHE.glob("*"))


def test_hopper_has_instructions_of_its_own() -> None:
    """Other GPUs are named by their capability."""
    assert [compiling.architecture(capability) for capability in (75, 80, 90, 120)] == ["sm_75", "sm_80", "sm_90a", "sm_120"]


def test_headers_are_found_through_headers(sources: Path) -> None:
    """Each once, even in a circle."""
    (sources / "value.cuh").write_text(HEADER + '#include "other.cuh"\n')
    (sources / "other.cuh").write_text('#include "value.cuh"\n')
    assert [*compiling.headers_of(KERNEL)] == ["other.cuh", "value.cuh"]


def test_the_same_is_compiled_once(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process reads what the first has written."""
    first = compiling.load_cubin("set", ("A=1",), "sm_80")
    monkeypatch.setattr(compiling, "compile_source", None)
    assert compiling.load_cubin("set", ("A=1",), "sm_80") == first
    assert first.startswith(b"\x7fELF")
    assert len(kept()) == 1


def test_whatever_it_depends_on_makes_another(sources: Path) -> None:
    """Defines, architecture, source and header."""
    compiling.load_cubin("set", (), "sm_80")
    compiling.load_cubin("set", ("A=1",), "sm_80")
    compiling.load_cubin("set", (), "sm_90a")
    (sources / "value.cuh").write_text(HEADER.replace("1", "2"))
    compiling.load_cubin("set", (), "sm_80")
    (sources / "set.cu").write_text(KERNEL + "\n")
    compiling.load_cubin("set", (), "sm_80")
    assert len(kept()) == 5


def test_without_a_cache_it_still_compiles(sources: Path) -> None:
    """A file stands where the folder should be."""
    compiling.CACHE.parent.parent.mkdir(exist_ok=True)
    compiling.CACHE.parent.write_text("")
    assert compiling.load_cubin("set", (), "sm_80").startswith(b"\x7fELF")


def test_what_does_not_compile_says_why(sources: Path) -> None:
    """With the compiler's words, the architecture and the defines."""
    (sources / "set.cu").write_text(KERNEL.replace("VALUE", "NOTHING"))
    with pytest.raises(BackendUnavailable, match=r"(?s)set\.cu does not compile for sm_80 with A=1.*NOTHING.*undefined") as caught:
        compiling.load_cubin("set", ("A=1",), "sm_80")
    assert caught.value.remedy is not None
    assert not kept()


def test_registers_and_spills_are_in_the_log(sources: Path) -> None:
    """Where the compiler is asked for them."""
    assert "Used" in compiling.compile_source("set", (), "sm_80", "-Xptxas=-v").log
