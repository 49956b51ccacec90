"""Where machine code is kept, and who compiles it."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dcnr.backends.cpu import jit
from dcnr.errors import BackendUnavailable

KERNEL = """
from dcnr.backends.cpu.jit import kernel

@kernel("f8(f8)")
def half(x):
    return x / 2
"""
LOAD = """
import sys
from pathlib import Path
from dcnr.backends.cpu.jit import fill_cache
fill_cache(Path(sys.argv[1]), "tiny")
import tiny
print(sum(tiny.half.stats.cache_hits.values()), sum(tiny.half.stats.cache_misses.values()), tiny.half(3.0))
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
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, second = jit.cache_folder(), jit.cache_folder()
    assert first.is_dir()
    assert first != second
    assert first.stat().st_mode & 0o077 == 0


def test_a_process_loads_what_another_compiled(tmp_path: Path) -> None:
    """Also the first one, which finds no cache: so all run the same machine code."""
    (tmp_path / "tiny.py").write_text(KERNEL)
    folder = tmp_path / "cache"
    folder.mkdir()
    script = f"import sys; sys.path[:] = {[str(tmp_path), *sys.path]!r}" + LOAD
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["1", "0", "1.5"]


def test_one_process_compiles_and_the_others_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of two that find no cache, the second finds it complete when it gets the lock, and does not compile again."""
    monkeypatch.setattr(jit.settings, "CACHE_DIR", jit.settings.CACHE_DIR)
    monkeypatch.syspath_prepend(str(tmp_path))
    log = tmp_path / "log"
    (tmp_path / "appends.py").write_text(f"open({str(log)!r}, 'a').write('compiled ')")
    with (tmp_path / "lock").open("w") as lock, ThreadPoolExecutor(2) as threads:
        fcntl.flock(lock, fcntl.LOCK_EX)
        both = [threads.submit(jit.fill_cache, tmp_path, "appends") for _ in range(2)]
        assert not log.exists()
        fcntl.flock(lock, fcntl.LOCK_UN)
        for one in both:
            one.result(timeout=50)
    assert log.read_text() == "compiled "
    assert list(tmp_path.glob("complete-*"))


def test_a_complete_cache_needs_no_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Agents that start later load side by side."""
    monkeypatch.setattr(jit.settings, "CACHE_DIR", jit.settings.CACHE_DIR)
    jit.fill_cache(tmp_path, "this")
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        jit.fill_cache(tmp_path, "must_not_be_imported")
        assert str(tmp_path) == jit.settings.CACHE_DIR


def test_a_failed_compilation_is_told_and_not_complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the compiler's last line; the next process compiles what is missing."""
    monkeypatch.setattr(jit.settings, "CACHE_DIR", jit.settings.CACHE_DIR)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(BackendUnavailable, match="do not compile: ZeroDivisionError: division by zero"):
        jit.fill_cache(tmp_path, "broken")
    assert not list(tmp_path.glob("complete-*"))
