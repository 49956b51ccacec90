"""What every storage must do; each kind's test file runs it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dcnr.errors import NotFound, UserError
from dcnr.storage.base import Storage, open_storage


class StorageContract:
    """Subclass it and give a `storage` fixture: an empty one."""

    async def test_what_was_put_is_got(self, storage: Storage) -> None:
        """Also nothing at all."""
        await storage.put("a/b", b"hello")
        await storage.put("empty")
        assert await storage.get("a/b") == b"hello"
        assert await storage.get("empty") == b""

    async def test_buffers_are_joined(self, storage: Storage) -> None:
        """In order, whatever kind they are."""
        array = np.arange(3, dtype="<u2")
        await storage.put("k", b"ab", bytearray(b"cd"), array.data.cast("B"))
        assert await storage.get("k") == b"abcd\x00\x00\x01\x00\x02\x00"

    async def test_a_second_put_replaces(self, storage: Storage) -> None:
        """A shorter blob leaves nothing of the longer one."""
        await storage.put("k", b"long and old")
        await storage.put("k", b"new")
        assert await storage.get("k") == b"new"
        assert await storage.list("") == ["k"]

    async def test_list_goes_by_prefix_as_text(self, storage: Storage) -> None:
        """Sorted; a slash at the end means a folder; nothing is no error."""
        for key in ("a/2", "a/1", "ab/1", "b"):
            await storage.put(key, b"x")
        assert await storage.list("") == ["a/1", "a/2", "ab/1", "b"]
        assert await storage.list("a") == ["a/1", "a/2", "ab/1"]
        assert await storage.list("a/") == ["a/1", "a/2"]
        assert await storage.list("nothing/") == []

    async def test_sizes_are_of_the_same_keys(self, storage: Storage) -> None:
        """In the same order."""
        await storage.put("b", b"three", b"more")
        await storage.put("a/1")
        assert list((await storage.sizes("")).items()) == [("a/1", 0), ("b", 9)]
        assert await storage.sizes("a") == {"a/1": 0}

    async def test_what_is_read_cannot_be_changed(self, storage: Storage) -> None:
        """Arrays may share its memory."""
        await storage.put("k", b"hello")
        assert memoryview(await storage.get("k")).readonly

    async def test_a_sweep_removes_no_blob(self, storage: Storage) -> None:
        """However old."""
        await storage.put("a/b", b"x")
        await storage.sweep("")
        assert await storage.list("") == ["a/b"]

    async def test_delete_goes_by_prefix_too(self, storage: Storage) -> None:
        """And only that; again is no error."""
        for key in ("a/1", "a/deep/2", "ab"):
            await storage.put(key, b"x")
        await storage.delete("a/")
        await storage.delete("a/")
        assert await storage.list("") == ["ab"]
        await storage.delete("ab")
        assert await storage.list("") == []
        await storage.put("a/1", b"again")
        assert await storage.get("a/1") == b"again"

    async def test_exists(self, storage: Storage) -> None:
        """A blob does, a folder does not."""
        await storage.put("a/b", b"x")
        assert await storage.exists("a/b")
        assert not await storage.exists("a")
        assert not await storage.exists("c")

    async def test_a_missing_blob_is_named(self, storage: Storage) -> None:
        """With where it was looked for."""
        await storage.put("a/c", b"x")
        with pytest.raises(NotFound, match="no 'a/b' in"):
            await storage.get("a/b")

    @pytest.mark.parametrize("key", ["../out", "/out", "a/../../out", ""])
    async def test_keys_that_escape_are_refused(self, storage: Storage, key: str) -> None:
        """By every method that takes one."""
        for refused in (storage.put(key, b"x"), storage.get(key), storage.exists(key)):
            with pytest.raises(UserError, match="is not a storage key"):
                await refused

    @pytest.mark.parametrize("prefix", ["../", "/", "a/../.."])
    async def test_prefixes_that_escape_are_refused(self, storage: Storage, prefix: str) -> None:
        """Above all by delete."""
        for refused in (storage.list(prefix), storage.sizes(prefix), storage.sweep(prefix), storage.delete(prefix)):
            with pytest.raises(UserError, match="no storage key starts with"):
                await refused

    async def test_its_url_leads_back(self, storage: Storage) -> None:
        """Another process finds the same blobs."""
        await storage.put("k", b"x")
        assert await open_storage(storage.url).get("k") == b"x"

    async def test_puts_at_the_same_time(self, storage: Storage) -> None:
        """Of one key: one of them whole; of many: all."""
        blobs = [bytes([65 + index]) * 100_000 for index in range(8)]
        await asyncio.gather(*(storage.put("same", blob) for blob in blobs))
        await asyncio.gather(*(storage.put(f"many/{index}", blob) for index, blob in enumerate(blobs)))
        assert await storage.get("same") in blobs
        assert [await storage.get(f"many/{index}") for index in range(8)] == blobs
