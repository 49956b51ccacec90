"""Datasets between a data directory and a storage: `datasets/<name>/` there holds manifest and shards, and the tokenizer besides.

Rule 1: the manifest goes last, so a dataset that is half up does not exist.
Rule 2: all that comes or goes must have the sha256 that the manifest says.
Rule 3: `fetch_*` block and start a loop of their own: they are for threads without one.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from dcnr.data.manifest import MANIFEST_NAME, DatasetManifest, dataset_folder, decode_manifest, encode_manifest, read_manifest
from dcnr.errors import AlreadyExists, NotFound, PeerError, UserError
from dcnr.storage.base import Storage
from dcnr.storage.file import FileStorage, write_file
from dcnr.text.tokenizer import fingerprint, tokenizer_path

TOKENIZER_NAME = "tokenizer.json"


def key_of(name: str, file: str) -> str:
    """Where a file of dataset `name` is in a storage."""
    return f"datasets/{name}/{file}"


def is_of(storage: Storage, data_dir: Path) -> bool:
    """Whether `storage` is the data directory itself, as it is by default: then no dataset can come from there, or go there."""
    return storage.url == FileStorage(data_dir).url


async def push_dataset(data_dir: Path, name: str, storage: Storage, on_progress: Callable[[int, int], None]) -> DatasetManifest:
    """Put dataset `name` into `storage`; `on_progress` hears of (tokens up, tokens in all).

    Raises `AlreadyExists` where another dataset of that name is there, `UserError` for damaged files.
    """
    folder, manifest = dataset_folder(data_dir, name), await asyncio.to_thread(read_manifest, data_dir, name)
    if is_of(storage, data_dir):
        raise UserError(
            f"the storage {storage.url} is the data directory itself", "say with --storage or $DCNR_STORAGE where else it is to be"
        )
    key = key_of(name, MANIFEST_NAME)
    if await storage.exists(key):
        if decode_manifest(bytes(await storage.get(key)), name, f"{storage.url}/{key}") == manifest:
            return manifest
        raise AlreadyExists(f"there is another dataset '{name}' in {storage.url}", "choose another name")
    files = [(tokenizer_path(data_dir, manifest.tokenizer), TOKENIZER_NAME, manifest.tokenizer_sha256, 0)]
    files += [(folder / shard.file, shard.file, shard.sha256, shard.tokens) for shard in manifest.shards]
    total, done = sum(tokens for *_, tokens in files), 0
    for path, file, sha256, tokens in files:
        data = await asyncio.to_thread(_read, path, sha256, name)
        await storage.put(key_of(name, file), data)
        done += tokens
        on_progress(done, total)
    await storage.put(key, encode_manifest(manifest))
    return manifest


def fetch_dataset(data_dir: Path, name: str, storage: Storage) -> None:
    """Make dataset `name` of `storage` one of `data_dir`, with its tokenizer; its shards come when they are read."""
    folder = dataset_folder(data_dir, name)
    try:
        data = bytes(asyncio.run(storage.get(key_of(name, MANIFEST_NAME))))
    except NotFound:
        raise NotFound(f"there is no dataset '{name}' in {data_dir}, nor in {storage.url}", "make one with `dcnr dataset create`") from None
    manifest = decode_manifest(data, name, f"{storage.url}/{key_of(name, MANIFEST_NAME)}")
    tokenizer = tokenizer_path(data_dir, manifest.tokenizer)
    if not tokenizer.exists():
        write_file(tokenizer, fetch_blob(storage, key_of(name, TOKENIZER_NAME), manifest.tokenizer_sha256))
    elif fingerprint(data_dir, manifest.tokenizer) != manifest.tokenizer_sha256:
        raise UserError(
            f"dataset '{name}' of {storage.url} was made with another tokenizer '{manifest.tokenizer}' than the one in {data_dir}",
            f"`dcnr tokenizer delete {manifest.tokenizer}` if nothing needs it, or use another data directory",
        )
    write_file(folder / MANIFEST_NAME, data)


def check_there(storage: Storage, name: str, sizes: Mapping[str, int]) -> None:
    """Raise `UserError` unless the storage has these files of dataset `name`, of these sizes."""
    there = asyncio.run(storage.sizes(key_of(name, "")))
    for file, size in sizes.items():
        if there.get(key_of(name, file)) != size:
            raise UserError(
                f"{file} of dataset '{name}' is neither here nor, whole, in {storage.url}", "push the dataset again, or create it"
            )


def fetch_blob(storage: Storage, key: str, sha256: str) -> bytes | memoryview:
    """A blob that must have this hash."""
    try:
        data = asyncio.run(storage.get(key))
    except NotFound as error:
        raise UserError(f"{storage.url} lost {key}, a part of a dataset", "push the dataset again from where it was made") from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise PeerError(f"{storage.url}/{key} is damaged: its sha256 is {found[:12]}…, not {sha256[:12]}…", "push the dataset again")
    return data


def _read(path: Path, sha256: str, name: str) -> bytes:
    if not path.exists():
        raise UserError(f"{path} is missing", f"`dcnr dataset verify {name}` fetches what another storage has; else create it again")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f"{path} is not what its dataset was made with", "create the dataset again")
    return data
