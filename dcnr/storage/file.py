"""Storage in a folder: `file:///absolute/path`.

A blob is written to a hidden file beside its place, synced, renamed, and the folder synced: after a crash there is the old blob or the
new one.
Everything runs on threads; the loop never waits for the disk.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from dcnr.errors import NotFound, UserError
from dcnr.storage.keys import check_key, check_prefix

Buffer = bytes | bytearray | memoryview


class FileStorage:
    """Blobs as files under one folder, which is made when the first one comes. The methods are those of `Storage`."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @classmethod
    def from_url(cls, url: str) -> FileStorage:
        """Of `file:///absolute/path`."""
        parts = urlsplit(url)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise UserError(f"'{url}' is not a storage URL", "use file:///absolute/path")
        return cls(Path(unquote(parts.path)))

    @property
    def url(self) -> str:
        """`file:///absolute/path`."""
        return f"file://{quote(str(self._root))}"

    async def put(self, key: str, *data: Buffer) -> None:
        """Write a blob."""
        await asyncio.to_thread(write_file, self._path(key), *data)

    async def get(self, key: str) -> bytes:
        """Read a blob."""
        return await asyncio.to_thread(self._read, key)

    async def list(self, prefix: str) -> list[str]:
        """Find blobs."""
        return await asyncio.to_thread(_keys, self._root, prefix)

    async def delete(self, prefix: str) -> None:
        """Remove blobs, and the folders that become empty."""
        await asyncio.to_thread(self._delete, prefix)

    async def exists(self, key: str) -> bool:
        """Look for a blob."""
        return await asyncio.to_thread(self._path(key).is_file)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _read(self, key: str) -> bytes:
        path = self._path(key)
        if not path.is_file():
            raise NotFound(f"there is no '{key}' in {self.url}")
        with _translated(path):
            return path.read_bytes()

    def _delete(self, prefix: str) -> None:
        for key in _keys(self._root, prefix):
            path = self._path(key)
            with _translated(path):
                path.unlink(missing_ok=True)
            _remove_empty(path.parent, self._root)


def _keys(root: Path, prefix: str) -> list[str]:
    folder = root / check_prefix(prefix).rpartition("/")[0]
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return sorted(key for path in files if (key := path.relative_to(root).as_posix()).startswith(prefix))


def write_file(path: Path, *data: Buffer) -> None:
    """Write the buffers one after the other as `path`, whole or not at all, and sync."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with _translated(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.writelines(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_empty(folder: Path, root: Path) -> None:
    while folder != root:
        try:
            folder.rmdir()
        except OSError:  # not empty, or somebody else removed it
            return
        folder = folder.parent


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", "the storage folder must be writable and have room") from error
