"""Storage in a folder: `file:///absolute/path`.

A blob is written to a hidden file beside its place, synced, renamed, and the folder synced: after a crash there is the old blob or the
new one.
Everything runs on threads; the loop never waits for the disk.
A folder that is not there yet holds nothing; but who asks for a blob in it is told that the folder is gone, and not that the blob is.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from dcnr.errors import NotFound, UserError, WorldError
from dcnr.storage.keys import HALF_WRITTEN, check_key, check_prefix, is_key

Buffer = bytes | bytearray | memoryview

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}")

FOR_A_PERSON = frozenset(
    {
        errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR,
        errno.EISDIR, errno.EEXIST,
    }
)  # fmt: skip
"""What stays as it is until somebody mends it. Everything else (no room, a stale handle, a disk or network that fails) may pass."""


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
        return list(await self.sizes(prefix))

    async def sizes(self, prefix: str) -> dict[str, int]:
        """Find blobs and measure them."""
        return await asyncio.to_thread(_sizes, self._root, check_prefix(prefix))

    async def delete(self, prefix: str) -> None:
        """Remove blobs, and the folders that become empty."""
        await asyncio.to_thread(self._delete, check_prefix(prefix))

    async def exists(self, key: str) -> bool:
        """Look for a blob."""
        return await asyncio.to_thread(_is_file, self._path(key))

    async def sweep(self, prefix: str) -> None:
        """Remove hidden files that are too old to become blobs."""
        await asyncio.to_thread(_sweep, self._root, check_prefix(prefix), time.time() - HALF_WRITTEN)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _read(self, key: str) -> bytes:
        path = self._path(key)
        with _translated(path):
            try:
                return path.read_bytes()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
                if not self._root.is_dir():
                    raise WorldError(f"the storage folder {self._root} is not there", "is it mounted? nothing was changed") from error
                raise NotFound(f"there is no '{key}' in {self.url}") from error

    def _delete(self, prefix: str) -> None:
        for key in _sizes(self._root, prefix):
            path = self._path(key)
            with _translated(path):
                path.unlink(missing_ok=True)
            _remove_empty(path.parent, self._root)


def _sizes(root: Path, prefix: str) -> dict[str, int]:
    folder = root / prefix.rpartition("/")[0]
    found: dict[str, int] = {}
    with _translated(folder):
        for path in _files(folder):
            key = path.relative_to(root).as_posix()
            if is_key(key) and key.startswith(prefix) and path.is_file():
                found[key] = _size(path)
    return dict(sorted(found.items()))


def _files(folder: Path) -> Iterator[Path]:
    """Every file below; a folder that is removed meanwhile (checkpoints are, while others look) holds none."""

    def tell(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for where, _, names in os.walk(folder, onerror=tell):
        yield from (Path(where, name) for name in names)


def _sweep(root: Path, prefix: str, before: float) -> None:
    folder = root / prefix.rpartition("/")[0]
    with _translated(folder):
        for path in list(_files(folder)):
            name = _TEMPORARY.fullmatch(path.name)
            if name is None or not (path.relative_to(root).parent / name[1]).as_posix().startswith(prefix):
                continue
            with suppress(FileNotFoundError):  # it became a blob
                if path.stat().st_mtime < before:
                    path.unlink()
                    _remove_empty(path.parent, root)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # removed since it was found, which is as if it had been found earlier
        return 0


def _is_file(path: Path) -> bool:
    with _translated(path):
        return path.is_file()


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
        what = f"{path}: {error.strerror or error}"
        if error.errno in FOR_A_PERSON:
            raise UserError(what, "the storage folder must be writable for the user that runs this") from error
        raise WorldError(what, "the storage folder must be there and have room") from error
