"""Storage in a folder."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dcnr.errors import NotFound, UserError, WorldError
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
    with pytest.raises(WorldError, match=r"/k: No space left on device"):
        write_file(tmp_path / "k", b"new")
    assert files_of(tmp_path) == ["k"]
    assert (tmp_path / "k").read_bytes() == b"old"


async def test_a_half_written_blob_is_not_listed(tmp_path: Path) -> None:
    """What a killed process left behind is hidden."""
    (tmp_path / ".k.12345678").write_bytes(b"half")
    assert await FileStorage(tmp_path).list("") == []


async def test_what_is_no_blob_is_not_listed_and_stays(tmp_path: Path) -> None:
    """Notes of a person, and a hidden folder of the file system."""
    storage = FileStorage(tmp_path)
    await storage.put("a/k", b"data")
    (tmp_path / "a" / "notes (1).txt").write_text("hello")
    (tmp_path / "a" / ".snapshot").mkdir()
    (tmp_path / "a" / ".snapshot" / "k").write_bytes(b"old")
    assert await storage.list("a/") == ["a/k"]
    await storage.delete("a/")
    assert files_of(tmp_path / "a") == [".snapshot", ".snapshot/k", "notes (1).txt"]


async def test_a_file_in_the_way_of_a_folder_is_an_error(tmp_path: Path) -> None:
    """One sentence that names the place."""
    storage = FileStorage(tmp_path)
    await storage.put("a", b"x")
    with pytest.raises(UserError, match="/a/b"):
        await storage.put("a/b", b"x")


async def test_a_folder_that_is_gone_says_nothing_about_its_blobs(tmp_path: Path) -> None:
    """A disk that is not mounted must not make checkpoints damaged; but before the first blob there may be no folder."""
    storage = FileStorage(tmp_path / "store")
    assert await storage.list("") == []
    assert not await storage.exists("k")
    with pytest.raises(WorldError, match=r"the storage folder .*/store is not there"):
        await storage.get("k")
    await storage.put("k", b"x")
    assert await storage.get("k") == b"x"
    for key in ("a", "k/below"):
        with pytest.raises(NotFound, match=f"there is no '{key}'"):
            await storage.get(key)


async def test_a_sweep_removes_what_killed_writers_left(tmp_path: Path) -> None:
    """Once nobody can be writing it any more, under the prefix, and nothing else."""
    storage = FileStorage(tmp_path)
    old, young, elsewhere = tmp_path / "a/b/.k.0123abcd", tmp_path / "a/.k.0123abce", tmp_path / "c/.k.0123abcd"
    foreign = tmp_path / "a/.profile"
    for path in (old, young, elsewhere, foreign):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    for path in (old, elsewhere, foreign):
        os.utime(path, (0, 0))
    await storage.sweep("a/")
    assert files_of(tmp_path) == ["a", "a/.k.0123abce", "a/.profile", "c", "c/.k.0123abcd"]


CHILD = """
import asyncio, resource, sys
from pathlib import Path
from dcnr.errors import UserError, WorldError
from dcnr.storage.file import FileStorage

async def main(storage, kind, size):
    await storage.put("checkpoints/k", b"old")
    if kind == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    try:
        await storage.put("checkpoints/k", bytes(size // 2), bytes(size // 2))
    except (UserError, WorldError) as error:
        print(type(error).__name__, error.message)
    assert await storage.get("checkpoints/k") == b"old"
    await storage.put("checkpoints/small", b"there is room for this")
    print(*await storage.list(""), sum(1 for path in Path(sys.argv[1]).rglob(".*")))

asyncio.run(main(FileStorage(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
"""


def test_a_file_that_grows_too_large(tmp_path: Path) -> None:
    """A process whose files are limited is told so; the old blob stays, nothing half-written does, and small ones are still taken."""
    done = subprocess.run([sys.executable, "-c", CHILD, tmp_path, "limit", "1000000"], capture_output=True, text=True, timeout=50)
    assert done.stdout.splitlines() == [f"UserError {tmp_path}/checkpoints/k: File too large", "checkpoints/k checkpoints/small 0"], (
        done.stderr
    )


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """The same on a real file system without room, which may have room again later."""
    mounted = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=256k none "$0" && exec "$@"',
        str(tmp_path),
    ]
    if sys.platform != "linux" or subprocess.run([*mounted, "true"], capture_output=True).returncode != 0:
        pytest.skip("nobody but root may mount a file system here")
    command = [*mounted, sys.executable, "-c", CHILD, str(tmp_path), "full", "1000000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    expected = [f"WorldError {tmp_path}/checkpoints/k: No space left on device", "checkpoints/k checkpoints/small 0"]
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.parametrize(
    ("number", "error"), [(errno.EIO, WorldError), (errno.ESTALE, WorldError), (errno.EACCES, UserError), (errno.EROFS, UserError)]
)
def test_what_may_pass_is_told_from_what_somebody_must_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    """Callers try again for the former only."""

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(error, match=os.strerror(number)):
        write_file(tmp_path / "k", b"new")


def test_other_urls_are_refused() -> None:
    """With the form of those that are known."""
    with pytest.raises(UserError, match=r"'gs' is no kind of storage: there are file:// and s3://"):
        open_storage("gs://bucket/prefix")
    for url in ("file://relative/path", "file:relative", "nonsense", ""):
        with pytest.raises(UserError, match="file:///absolute/path"):
            open_storage(url)


def test_an_url_says_where(tmp_path: Path) -> None:
    """Quoted, absolute."""
    assert FileStorage(Path("/a b/c")).url == "file:///a%20b/c"
    assert open_storage("file:///a%20b/c").url == "file:///a%20b/c"


async def test_a_listing_meets_folders_that_are_being_removed(tmp_path: Path) -> None:
    """As when old checkpoints go while somebody looks at the new ones."""
    storage = FileStorage(tmp_path)
    await storage.put("kept/blob", b"x")

    async def come_and_go() -> None:
        for number in range(60):
            await storage.put(f"kept/{number}/blob", b"x")
            await storage.delete(f"kept/{number}/")

    coming = asyncio.create_task(come_and_go())
    while not coming.done():
        assert "kept/blob" in await storage.list("kept/")
    await coming
