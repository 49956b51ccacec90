"""Storage in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dcnr.errors import UserError
from dcnr.storage.base import Storage, open_storage
from dcnr.storage.file import FileStorage, write_file
from tests.storage.contract import StorageContract


class TestFileStorage(StorageContract):
    """A folder that does not exist yet, with a name that a URL must quote."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        """Fresh."""
        return FileStorage(tmp_path / "my storage #1")


def files_of(folder: Path) -> list[str]:
    """Everything in a folder, hidden things too."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


async def test_blobs_are_plain_files_and_empty_folders_go(tmp_path: Path) -> None:
    """So that people can look, copy and rsync; nothing temporary is left."""
    storage = FileStorage(tmp_path)
    await storage.put("a/b/c.txt", b"hello")
    assert files_of(tmp_path) == ["a", "a/b", "a/b/c.txt"]
    assert (tmp_path / "a/b/c.txt").read_bytes() == b"hello"
    await storage.delete("a/b/")
    assert files_of(tmp_path) == []


def test_a_put_that_fails_leaves_the_old_blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the disk fills up before the rename; the error names the file."""
    write_file(tmp_path / "k", b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"/k: No space left on device"):
        write_file(tmp_path / "k", b"new")
    assert files_of(tmp_path) == ["k"]
    assert (tmp_path / "k").read_bytes() == b"old"


async def test_a_half_written_blob_is_not_listed(tmp_path: Path) -> None:
    """What a killed process left behind is hidden."""
    (tmp_path / ".k.12345678").write_bytes(b"half")
    assert await FileStorage(tmp_path).list("") == []


async def test_a_file_in_the_way_of_a_folder_is_an_error(tmp_path: Path) -> None:
    """One sentence that names the place."""
    storage = FileStorage(tmp_path)
    await storage.put("a", b"x")
    with pytest.raises(UserError, match="/a/b"):
        await storage.put("a/b", b"x")


def test_other_urls_are_refused() -> None:
    """With what this version can do."""
    with pytest.raises(UserError, match=r"this version stores in file:// only"):
        open_storage("s3://bucket/prefix")
    for url in ("file://relative/path", "file:relative", "nonsense", ""):
        with pytest.raises(UserError, match="file:///absolute/path"):
            open_storage(url)


def test_an_url_says_where(tmp_path: Path) -> None:
    """Quoted, absolute."""
    assert FileStorage(Path("/a b/c")).url == "file:///a%20b/c"
    assert open_storage("file:///a%20b/c").url == "file:///a%20b/c"
