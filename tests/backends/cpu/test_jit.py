"""Where machine code is kept, and who compiles it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dcnr.backends.cpu import jit

SCRIPT = """
import sys, threading
from pathlib import Path
from dcnr.backends.cpu import jit
folder = Path(sys.argv[1])
with jit.compiling(folder):
    alone = folder / "alone"
    alone.touch(exist_ok=False)  # fails if another process is here too
    print("in", flush=True)
    sys.stdin.readline()
    alone.unlink()
"""


def test_the_folder_is_named_by_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same sources find the same folder."""
    monkeypatch.setattr(jit, "CACHE", tmp_path / "deep" / "cache")
    first = jit.cache_folder()
    assert first.parent == tmp_path / "deep" / "cache"
    assert first.is_dir()
    assert jit.cache_folder() == first


def test_a_private_folder_where_the_cache_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file stands in the way: still a place to compile into, for this process alone."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(jit, "CACHE", tmp_path / "file" / "cache")
    monkeypatch.setattr(jit.tempfile, "tempdir", str(tmp_path))
    first, second = jit.cache_folder(), jit.cache_folder()
    assert first.is_dir()
    assert first != second
    assert first.stat().st_mode & 0o077 == 0


def test_one_process_compiles_at_a_time(tmp_path: Path) -> None:
    """The second enters only when the first is through, and then finds the cache complete."""
    first, second = (
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    )
    for process in (first, second):
        process.stdin.write("go\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
    for process in (first, second):
        out, _ = process.communicate(timeout=50)
        assert (process.returncode, out.strip()) == (0, "in")
    assert list(tmp_path.glob("complete-*"))
