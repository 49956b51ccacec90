"""A session's state at one step, in storage.

    checkpoints/<session>/<step>/<pnode>.<epoch>.safetensors     one part per PNode
    checkpoints/<session>/<step>/manifest.json                   written last

Rule 1: a checkpoint without manifest does not exist. So parts may be uploaded in any order, twice, or never.
Rule 2: names are those of the network file, whatever passes merged: `<node>.<parameter>`, its Adam moments `…:m` and `…:v`, all float32.
Rule 3: a part's sha256 stands in the manifest and is checked at every read.
Rule 4: two epochs never write the same part, so a PNode that was given up cannot damage what its successor saved.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from dcnr.bus.messages import SavedPart
from dcnr.errors import NotFound, PeerError
from dcnr.ids import Epoch, NetworkId, PNodeId, SessionId, check_id
from dcnr.optim.decide import ScalerState
from dcnr.storage.base import Storage
from dcnr.storage.file import Buffer, write_file
from dcnr.storage.tensors import Float32Array, decode_tensors, encode_tensors

MOMENTS = (":m", ":v")
"""What follows a parameter's name in the names of its Adam moments."""

_ROOT = "checkpoints/"
_MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a session needs to go on after `step` optimizer steps, on other machines and days.

    `step` is the data cursor too: the next batch is that of step + 1. `hyper`: fields of `optim.hyper.Hyper`. `kernel` says which CPU
    kernel and BLAS computed it: bits are promised for the same one. `created`: ISO 8601, UTC.
    """

    session: SessionId
    network: NetworkId
    network_file: str
    dataset: str
    step: int
    epoch: Epoch
    seed: int
    total_steps: int
    batch: int
    micro_batches: int
    fuse: bool
    hyper: dict[str, str | int | float | bool | None]
    state: ScalerState
    parts: tuple[SavedPart, ...]
    kernel: str
    created: str
    dcnr_version: str
    version: int = 1

    @property
    def key(self) -> str:
        """Where it is kept."""
        return manifest_key(self.session, self.step)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(name for part in self.parts for name in part.tensors))


_MANIFEST = TypeAdapter(Manifest)


def checkpoint_prefix(session: SessionId, step: int | None = None) -> str:
    """What the keys of a session's checkpoints, or of one of them, start with."""
    folder = f"{_ROOT}{check_id(session, 'session')}/"
    return folder if step is None else f"{folder}{step:010d}/"


def part_key(session: SessionId, step: int, pnode: PNodeId, epoch: Epoch) -> str:
    """Key of one PNode's part."""
    return f"{checkpoint_prefix(session, step)}{check_id(pnode, 'PNode')}.{epoch}.safetensors"


def manifest_key(session: SessionId, step: int) -> str:
    """Key of the manifest."""
    return f"{checkpoint_prefix(session, step)}{_MANIFEST_NAME}"


async def write_part(storage: Storage, key: str, tensors: Mapping[str, Float32Array]) -> SavedPart:
    """Upload `tensors` (by canonical name), which must not change meanwhile; they are not copied."""
    buffers = encode_tensors(tensors)
    sha256 = await asyncio.to_thread(_sha256, buffers)
    await storage.put(key, *buffers)
    return SavedPart(key, sha256, sum(buffer.nbytes for buffer in buffers), tuple(sorted(tensors)))


def _sha256(buffers: Iterable[Buffer]) -> str:
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


async def write_manifest(storage: Storage, manifest: Manifest) -> None:
    """Make the checkpoint exist: all its parts must be there."""
    await storage.put(manifest.key, _MANIFEST.dump_json(manifest, indent=2))


async def read_manifest(storage: Storage, session: SessionId, step: int | None = None) -> Manifest:
    """The manifest of a session's checkpoint at `step`, or of its newest one. Raises `NotFound`."""
    keys = await _manifest_keys(storage, checkpoint_prefix(session))
    key = manifest_key(session, step) if step is not None else max(keys, default="")
    if key not in keys:
        steps = ", ".join(str(int(known.split("/")[-2])) for known in keys) or "none"
        which = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise NotFound(f"session '{session}' has no {which} in {storage.url} (steps: {steps})", "see `dcnr checkpoint list`")
    return await read_manifest_at(storage, key)


async def read_manifest_at(storage: Storage, key: str) -> Manifest:
    """The manifest kept at `key`, as `Deploy.checkpoint` names it."""
    try:
        return _MANIFEST.validate_json(await storage.get(key))
    except ValidationError as error:
        raise PeerError(f"{storage.url}/{key} is damaged: {error.errors()[0]['msg']}", "use another step") from error


async def list_checkpoints(storage: Storage, session: SessionId | None = None) -> list[Manifest]:
    """The manifests of all checkpoints (of one session), by session and step."""
    keys = await _manifest_keys(storage, checkpoint_prefix(session) if session is not None else _ROOT)
    return [await read_manifest_at(storage, key) for key in keys]


async def _manifest_keys(storage: Storage, prefix: str) -> list[str]:
    return [key for key in await storage.list(prefix) if key.endswith(_MANIFEST_NAME)]


async def delete_checkpoints(storage: Storage, session: SessionId, step: int | None = None) -> None:
    """Remove one checkpoint, or all of a session; manifests first, so that half of one never exists."""
    prefix = checkpoint_prefix(session, step)
    for key in await _manifest_keys(storage, prefix):
        await storage.delete(key)
    await storage.delete(prefix)


async def read_tensors(storage: Storage, manifest: Manifest, names: Iterable[str]) -> dict[str, Float32Array]:
    """The tensors `names`, read-only. Raises `NotFound` for a name that is not there, `PeerError` for a damaged part."""
    wanted = set(names)
    if missing := wanted.difference(manifest.tensors):
        raise NotFound(f"checkpoint {manifest.key} has no tensor {sorted(missing)[0]} ({len(missing)} of {len(wanted)} are missing)")
    found: dict[str, Float32Array] = {}
    for part in manifest.parts:
        here = wanted.intersection(part.tensors)
        if here:
            tensors = await _read_part(storage, part)
            found.update((name, tensors[name]) for name in here)
    return found


async def _read_part(storage: Storage, part: SavedPart) -> dict[str, Float32Array]:
    data = await storage.get(part.key)
    sha256 = await asyncio.to_thread(_sha256, [data])
    if sha256 != part.sha256:
        raise PeerError(f"{storage.url}/{part.key} is damaged: its sha256 is {sha256[:12]}…, not {part.sha256[:12]}…", "use another step")
    tensors = decode_tensors(data)
    if set(tensors) != set(part.tensors):
        raise PeerError(f"{storage.url}/{part.key} does not hold the tensors that its manifest names", "use another step")
    return tensors


async def export_safetensors(storage: Storage, session: SessionId, step: int | None, out: Path) -> Manifest:
    """Write the weights (no moments) of one checkpoint, the newest if `step` is None, as one safetensors file.

    Metadata: the network file, and session, step, dataset. A tied matrix stands once, under its owner's name. Returns the manifest.
    """
    manifest = await read_manifest(storage, session, step)
    weights = await read_tensors(storage, manifest, [name for name in manifest.tensors if not name.endswith(MOMENTS)])
    metadata = {
        "format": "np",
        "network": manifest.network,
        "network_file": manifest.network_file,
        "session": manifest.session,
        "step": str(manifest.step),
        "dataset": manifest.dataset,
    }
    await asyncio.to_thread(write_file, out, *encode_tensors(weights, metadata))
    return manifest
