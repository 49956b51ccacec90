"""Where machine code is kept, and who compiles it."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dcnr.backends.cpu import jit

SCRIPT = """
import sys
from pathlib import Path
from dcnr.backends.cpu import jit
with jit.compiling(Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.readline()
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


def test_one_process_compiles_at_a_time(tmp_path: Path) -> None:
    """While it does, the lock is taken; when it is through, the cache is complete and the lock free."""
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "in"
    with (tmp_path / "lock").open("w") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert not list(tmp_path.glob("complete-*"))
        process.communicate("go\n", timeout=50)
        assert process.returncode == 0
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert list(tmp_path.glob("complete-*"))


def test_a_complete_cache_needs_no_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Agents that start later load side by side."""
    monkeypatch.setattr(jit.settings, "CACHE_DIR", jit.settings.CACHE_DIR)
    with jit.compiling(tmp_path):
        pass
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with jit.compiling(tmp_path):
            assert str(tmp_path) == jit.settings.CACHE_DIR


def test_an_interrupted_compilation_is_not_complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The next process compiles what is missing."""
    monkeypatch.setattr(jit.settings, "CACHE_DIR", jit.settings.CACHE_DIR)
    with pytest.raises(KeyboardInterrupt), jit.compiling(tmp_path):
        raise KeyboardInterrupt
    assert not list(tmp_path.glob("complete-*"))
