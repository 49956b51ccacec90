"""A process that is killed while it uploads: whatever was complete stays so."""

from __future__ import annotations

import hashlib
import multiprocessing
import secrets
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from dcnr.storage.base import Storage, open_storage
from dcnr.storage.checkpoint import newest_complete, prune, read_manifest, read_tensors, step_of
from dcnr.storage.tensors import encode_tensors
from tests.storage.uploader import RUN, tensors_at, upload_until_killed

KILLS = 20


def killed_after(url: str, first: int, epoch: int, delay: float) -> tuple[int, float]:
    """Save from step `first` on in a process that lives `delay` seconds from when it began: the last step it told, and seconds a step."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.storage.uploader"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=upload_until_killed, args=(url, first, epoch, theirs))
    process.start()
    theirs.close()
    assert ours.poll(50), "the uploader did not begin"
    done, began = ours.recv(), time.monotonic()
    last = began
    while (left := began + delay - time.monotonic()) > 0 and ours.poll(left):
        done, last = ours.recv(), time.monotonic()
    process.kill()
    process.join()
    done = max(done, drained(ours))
    process.close()
    return done, (last - began) / max(done - first + 1, 1)


def drained(told: Connection) -> int:
    """The last number in a pipe whose writer is dead; -1 if there is none."""
    last = -1
    while told.poll():
        try:
            last = told.recv()
        except EOFError:
            break
    told.close()
    return last


async def is_whole(storage: Storage, least: int) -> int:
    """The newest checkpoint is one of those that were complete when the process died, and what was saved."""
    manifest = await newest_complete(storage, RUN)
    assert manifest.step in (least, least + 1)
    for pnode, part in enumerate(manifest.parts):
        expected = b"".join(encode_tensors(tensors_at(manifest.step, pnode)))
        assert part.sha256 == hashlib.sha256(expected).hexdigest()
    assert len(manifest.parts) == 2
    return manifest.step


@pytest.mark.timeout(240)  # on a machine that does other things too
@pytest.mark.parametrize("kind", ["file", "s3"])
async def test_a_kill_at_any_point_of_an_upload_leaves_the_newest_complete_checkpoint(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The next process goes on from there; in the end nothing but that one, and what may still become a newer one, is left."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # noqa: T201
    draws = np.random.Generator(np.random.Philox(seed))
    url = f"file://{tmp_path}" if kind == "file" else request.getfixturevalue("bucket_url")
    storage = open_storage(url)
    step, seconds, delay = -1, 0.0, 1.0
    while step < 0:  # on a busy machine the first checkpoint takes longer
        step, seconds = killed_after(url, 0, 1, delay)
        delay *= 2
    step = await is_whole(storage, step)
    for kill in range(KILLS):
        delay = draws.uniform(0, 1.5) * max(seconds, 0.001)
        done, _ = killed_after(url, step + 1, kill + 2, delay)
        step = await is_whole(storage, done)
    await prune(storage, RUN, ())
    assert {step_of(key) for key in await storage.list("")} <= {step, step + 1}
    manifest = await read_manifest(storage, RUN)
    read = await read_tensors(storage, manifest, manifest.tensors)
    for name, array in (tensors_at(step, 0) | tensors_at(step, 1)).items():
        assert read[name].tobytes() == array.tobytes()
