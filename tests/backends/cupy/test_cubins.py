"""How kernels are compiled and kept: architectures, headers, the cache, and what is said of a source that does not compile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcnr.backends.cupy import compile as compiling
from dcnr.errors import BackendUnavailable

HEADER = "#pragma once\n#define VALUE 1\n"
KERNEL = '#include "value.cuh"\nextern "C" __global__ void set(int* p) { *p = VALUE; }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one kernel and a header."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "value.cuh").write_text(HEADER)
    (folder / "set.cu").write_text(KERNEL)
    monkeypatch.setattr(compiling, "SOURCES", folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where compiled kernels are kept; nothing is there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiling.cache_folder.cache_clear()
    yield tmp_path / "cache" / "dcnr" / "cubins"
    compiling.cache_folder.cache_clear()


def test_hopper_has_instructions_of_its_own() -> None:
    """Other GPUs are named by their capability."""
    assert [compiling.architecture(capability) for capability in (75, 80, 90, 120)] == ["sm_75", "sm_80", "sm_90a", "sm_120"]


def test_headers_are_found_through_headers(sources: Path) -> None:
    """Each once, even in a circle."""
    (sources / "value.cuh").write_text(HEADER + '#include "other.cuh"\n')
    (sources / "other.cuh").write_text('#include "value.cuh"\n')
    assert [*compiling.headers_of(KERNEL)] == ["other.cuh", "value.cuh"]


@pytest.mark.usefixtures("sources")
def test_the_same_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process reads what the first has written."""
    first = compiling.load_cubin("set", ("A=1",), "sm_80")
    monkeypatch.setattr(compiling, "compile_source", None)
    assert compiling.load_cubin("set", ("A=1",), "sm_80") == first
    assert first.startswith(b"\x7fELF")
    assert len(list(cache.iterdir())) == 1


@pytest.mark.usefixtures("sources")
def test_what_was_cut_off_is_compiled_again(cache: Path) -> None:
    """And written over, so that the next process finds a whole one."""
    whole = compiling.load_cubin("set", (), "sm_80")
    (kept,) = cache.iterdir()
    written = kept.read_bytes()
    for broken in (written[:100], written[:-1], b""):
        kept.write_bytes(broken)
        assert compiling.load_cubin("set", (), "sm_80") == whole
        assert kept.read_bytes() == written


def test_whatever_it_depends_on_makes_another(sources: Path, cache: Path) -> None:
    """Defines, architecture, source and header."""
    compiling.load_cubin("set", (), "sm_80")
    compiling.load_cubin("set", ("A=1",), "sm_80")
    compiling.load_cubin("set", (), "sm_90a")
    (sources / "value.cuh").write_text(HEADER.replace("1", "2"))
    compiling.load_cubin("set", (), "sm_80")
    (sources / "set.cu").write_text(KERNEL + "\n")
    compiling.load_cubin("set", (), "sm_80")
    assert len(list(cache.iterdir())) == 5


@pytest.mark.usefixtures("sources")
def test_without_a_folder_it_still_compiles(cache: Path) -> None:
    """A file stands where it should be."""
    cache.parent.parent.mkdir()
    cache.parent.write_text("")
    assert compiling.load_cubin("set", (), "sm_80").startswith(b"\x7fELF")


@pytest.mark.usefixtures("sources")
def test_without_a_home_it_still_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps nothing."""

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    compiling.cache_folder.cache_clear()
    assert compiling.cache_folder() is None
    assert compiling.load_cubin("set", (), "sm_80").startswith(b"\x7fELF")


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """What XDG_CACHE_HOME says counts if it is a whole path."""
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    compiling.cache_folder.cache_clear()
    assert compiling.cache_folder() == Path.home() / ".cache" / "dcnr" / "cubins"


@pytest.mark.usefixtures("sources")
def test_a_write_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even half a file under another name."""

    def full(source: str, target: str) -> None:
        raise OSError(f"no space left on device: {source} to {target}")

    monkeypatch.setattr(os, "replace", full)
    assert compiling.load_cubin("set", (), "sm_80").startswith(b"\x7fELF")
    assert not list(cache.iterdir())


def test_what_does_not_compile_says_why(sources: Path, cache: Path) -> None:
    """With the compiler's words, the architecture and the defines."""
    (sources / "set.cu").write_text(KERNEL.replace("VALUE", "NOTHING"))
    with pytest.raises(BackendUnavailable, match=r"(?s)set\.cu does not compile for sm_80 with A=1.*NOTHING.*undefined") as caught:
        compiling.load_cubin("set", ("A=1",), "sm_80")
    assert caught.value.remedy is not None
    assert not cache.exists()


def test_registers_and_spills_are_in_the_log(sources: Path) -> None:
    """Where the compiler is asked for them."""
    assert "Used" in compiling.compile_source("set", (), "sm_80", "-Xptxas=-v").log
