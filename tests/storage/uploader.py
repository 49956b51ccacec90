"""A process that saves checkpoints until it is killed."""

from __future__ import annotations

import asyncio
import os
from itertools import count
from multiprocessing.connection import Connection

import aioboto3  # noqa: F401  imported once, before it forks
import numpy as np

from dcnr.ids import Epoch, PNodeId, SessionId
from dcnr.storage import s3
from dcnr.storage.base import Storage, open_storage
from dcnr.storage.checkpoint import part_key, write_manifest, write_part
from dcnr.storage.tensors import Float32Array
from tests.storage.manifests import manifest_of
from tests.storage.server import CREDENTIALS, SMALLEST_PART

RUN = SessionId("run")


def tensors_at(step: int, pnode: int) -> dict[str, Float32Array]:
    """What PNode `pnode` holds after `step`: a large tensor and a small one."""
    generator = np.random.Generator(np.random.Philox(1000 * step + pnode))
    return {f"node{pnode}.{name}": generator.standard_normal(size, np.float32) for name, size in (("large", 40_000), ("small", 10))}


async def save(storage: Storage, step: int, epoch: int) -> None:
    """Both parts at once, then the manifest."""
    keys = [part_key(RUN, step, PNodeId(f"p{pnode}"), Epoch(epoch)) for pnode in (0, 1)]
    parts = await asyncio.gather(*(write_part(storage, key, tensors_at(step, pnode)) for pnode, key in enumerate(keys)))
    await write_manifest(storage, manifest_of(RUN, step, epoch, parts))


def upload_until_killed(url: str, first: int, epoch: int, told: Connection) -> None:
    """Save the steps from `first` on, and tell each that is complete, before the first also that it begins."""
    s3.PART = SMALLEST_PART  # so that 160 KB have several
    os.environ.update(CREDENTIALS)

    async def work() -> None:
        storage = open_storage(url)
        await storage.exists("k")
        told.send(first - 1)
        for step in count(first):
            await save(storage, step, epoch)
            told.send(step)

    asyncio.run(work())
