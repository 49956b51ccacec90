"""Which store a data directory belongs to: without its records a cluster has lost its sessions, and must not start as if it were new.

Rule 1: a random id stands in a file of the data directory and in the store. Who finds only the store's takes it over; who finds neither
makes both.
Rule 2: a file whose id the store does not have is an error that only a person can settle. So is a bucket that is missing where there is an
id, because the id is made last.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from dcnr.bus.base import BucketGone, Bus, KeyConflict
from dcnr.errors import PeerError, UserError, WorldError
from dcnr.ids import is_id
from dcnr.orchestrator.leader import BUCKET
from dcnr.orchestrator.store import BUCKETS
from dcnr.storage.file import write_file

KEY = "cluster"
FILE = "cluster.id"
ACCEPT = "--accept-empty-store"
VARIABLE = "DCNR_ACCEPT_EMPTY_STORE"
LOOKS = 3
"""How often a bucket must be missing, a second apart: servers of a cluster that just started may not know yet what they have."""
_ACCEPT_IT = (
    "or, if its networks and sessions may be forgotten, so that only checkpoints and training logs remain, start the orchestrator once"
    f" with {ACCEPT}, or `dcnr up` with {VARIABLE}=1 in its environment"
)
_RESTORE = f"restore the JetStream store of the server from a backup; {_ACCEPT_IT}"


class StoreVanished(UserError):
    """The server does not have the records of this data directory."""


async def identify(bus: Bus, data_dir: Path, accept: bool = False) -> str:
    """The id of the cluster, the same in the store and the data directory from now on. `accept`: the store may be another one.

    Raises `StoreVanished`, and `WorldError` while the server cannot tell.
    """
    known = None if accept else await asyncio.to_thread(_read, data_dir)
    if known is not None or (not accept and await _exists(bus, BUCKET)):
        found, missing = await _stored(bus)
        if known is not None and found != known:
            raise _vanished(data_dir, known, found)
        if found is not None and missing:
            raise StoreVanished(f"the NATS server has lost {', '.join(missing)}, which had records of this cluster", _RESTORE)
        if known is not None:
            return known
    found = await _claimed(bus)
    await asyncio.to_thread(write_file, data_dir / FILE, found.encode())
    return found


async def _stored(bus: Bus) -> tuple[str | None, list[str]]:
    """The id, and the buckets that are missing."""
    for look in range(LOOKS):
        missing = [bucket for bucket in (BUCKET, *BUCKETS.values()) if not await _exists(bus, bucket)]
        if not missing:
            break
        if look < LOOKS - 1:
            await asyncio.sleep(1.0)
    if BUCKET in missing:
        return None, missing
    entry = await (await bus.kv(BUCKET, make=False)).get(KEY)
    return None if entry is None else _checked(entry.value, f"the value of {BUCKET}/{KEY}"), missing


async def _exists(bus: Bus, bucket: str) -> bool:
    try:
        await bus.kv(bucket, make=False)
    except BucketGone:
        return False
    return True


async def _claimed(bus: Bus) -> str:
    """The id in the store, made if there is none."""
    for bucket in BUCKETS.values():
        await bus.kv(bucket)
    kv = await bus.kv(BUCKET)
    new = secrets.token_hex(16)
    try:
        await kv.create(KEY, new.encode())
    except KeyConflict:
        entry = await kv.get(KEY)
        if entry is None:
            raise WorldError(f"{BUCKET}/{KEY} was there and is gone", "try again") from None
        return _checked(entry.value, f"the value of {BUCKET}/{KEY}")
    return new


def _read(data_dir: Path) -> str | None:
    path = data_dir / FILE
    try:
        return _checked(path.read_bytes().strip(), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", "the data directory must be readable") from error


def _checked(value: bytes, place: str) -> str:
    text = value.decode(errors="replace")
    if not is_id(text):
        raise PeerError(f"{place} is not the id of a cluster", "it was damaged, or written by another program; remove it")
    return text


def _vanished(data_dir: Path, known: str, found: str | None) -> StoreVanished:
    if found is None:
        what = f"its store was emptied or replaced since {data_dir} was last used"
        return StoreVanished(f"the NATS server has no records of this cluster: {what}", _RESTORE)
    return StoreVanished(
        f"the NATS server has the records of another cluster ({found[:8]}) than the one that {data_dir} belongs to ({known[:8]})",
        f"point NATS_URL at the right server, or --data-dir at the right directory; {_ACCEPT_IT}",
    )
