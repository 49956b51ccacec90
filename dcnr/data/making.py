"""The folder in which a dataset is made, until it is one.

Rule 1: one process at a time makes a dataset of a name.
Rule 2: bad input leaves nothing; who is interrupted leaves what is done, for those who can go on with it.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dcnr.data.manifest import MANIFEST_NAME, DatasetManifest, encode_manifest
from dcnr.errors import UserError

FINAL = "final"
"""What becomes the dataset."""


@contextmanager
def making(work: Path) -> Iterator[Path]:
    """The folder `work`, ours alone, in which no `FINAL` is; it goes if the block succeeds, and if it fails for what the user must mend."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process is making this dataset in {work}", "wait for it, or choose another name") from error
        if (work / FINAL).exists():  # of one that was interrupted
            shutil.rmtree(work / FINAL)
        try:
            yield work
        except UserError:
            shutil.rmtree(work)
            raise
        shutil.rmtree(work)


def finish(work: Path, folder: Path, manifest: DatasetManifest) -> None:
    """Write the manifest beside the shards, and make them `folder`."""
    (work / FINAL / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    (work / FINAL).rename(folder)
