"""A session's state at one step, in storage.

    checkpoints/<session>/<step>/<pnode>.<epoch>.safetensors     one part per PNode
    checkpoints/<session>/<step>/manifest.json                   written last
    checkpoints/<session>/tokenizer.json                         of an imported session: no dataset need be there to read its ids

Rule 1: a checkpoint without manifest does not exist. So parts may be uploaded in any order, twice, or never.
Rule 2: names are those of the network file, whatever passes merged: `<node>.<parameter>`, its Adam moments `…:m` and `…:v`, all float32.
Rule 3: a part's sha256 stands in the manifest and is checked at every read.
Rule 4: two epochs never write the same part, so a PNode that was given up cannot damage what its successor saved.
Rule 5: a checkpoint that is damaged (`DAMAGED`: a part is missing, or is not what was written) is told apart from storage that cannot be
read now, which says nothing about the checkpoint.
Rule 6: the newest complete checkpoint is never removed by retention, nor anything that may still become a newer one.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from dcnr.bus.messages import SavedPart
from dcnr.errors import NotFound, PeerError
from dcnr.ids import Epoch, NetworkId, PNodeId, SessionId, check_id
from dcnr.optim.decide import ScalerState
from dcnr.storage.base import Storage
from dcnr.storage.file import Buffer
from dcnr.storage.tensors import Float32Array, decode_tensors, encode_tensors

MOMENTS = (":m", ":v")
"""What follows a parameter's name in the names of its Adam moments."""

DAMAGED = (NotFound, PeerError)
"""What reading a checkpoint raises if nobody will ever be able to read it. Any other error may be of the storage, or of this machine."""

_ROOT = "checkpoints/"
_MANIFEST_NAME = "manifest.json"
_OURS = re.compile(r"checkpoints/[^/]+/\d{10,}/(manifest\.json|[^/.]+\.\d+\.safetensors)")
"""Other files in the same folders are left alone."""


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


def tokenizer_key(session: SessionId) -> str:
    """Key of the tokenizer that an imported session came with."""
    return f"{checkpoint_prefix(session)}tokenizer.json"


async def write_part(storage: Storage, key: str, tensors: Mapping[str, Float32Array]) -> SavedPart:
    """Upload `tensors` (by canonical name), which must not change meanwhile; they are not copied."""
    buffers = encode_tensors(tensors)
    sha256 = await asyncio.to_thread(sha256_of, buffers)
    await storage.put(key, *buffers)
    return SavedPart(key, sha256, sum(buffer.nbytes for buffer in buffers), tuple(sorted(tensors)))


def sha256_of(buffers: Iterable[Buffer]) -> str:
    """Of the buffers one after the other, in hex."""
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


async def write_manifest(storage: Storage, manifest: Manifest) -> None:
    """Make the checkpoint exist: all its parts must be there."""
    await storage.put(manifest.key, _MANIFEST.dump_json(manifest, indent=2))


async def read_manifest(storage: Storage, session: SessionId, step: int | None = None) -> Manifest:
    """The manifest of a session's checkpoint at `step`, or of its newest one. Raises `NotFound`."""
    return await read_manifest_at(storage, (await find_manifests(storage, session, step))[-1])


async def find_manifests(storage: Storage, session: SessionId, step: int | None = None) -> list[str]:
    """The keys of a session's manifests by step, or of the one of `step`; none of them is read. Raises `NotFound` if there is none."""
    keys = await manifest_keys(storage, session)
    found = [key for key in keys if step in (None, step_of(key))]
    if not found:
        steps = ", ".join(str(step_of(known)) for known in keys) or "none"
        which = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise NotFound(f"session '{session}' has no {which} in {storage.url} (steps: {steps})", "see `dcnr checkpoint list`")
    return found


async def read_manifest_at(storage: Storage, key: str) -> Manifest:
    """The manifest kept at `key`, as `Deploy.checkpoint` names it."""
    data = await storage.get(key)
    try:
        manifest = _MANIFEST.validate_json(bytes(data))
    except ValidationError as error:
        raise PeerError(f"{storage.url}/{key} is damaged: {error.errors()[0]['msg']}", "use another step") from error
    if manifest.key != key:
        raise PeerError(f"{storage.url}/{key} is damaged: it is the manifest of {manifest.key}", "use another step")
    return manifest


async def manifest_keys(storage: Storage, session: SessionId | None = None) -> list[str]:
    """Where the manifests of all checkpoints (of one session) are, by session and step; none of them is read."""
    prefix = checkpoint_prefix(session) if session is not None else _ROOT
    return [key for key in await storage.list(prefix) if _OURS.fullmatch(key) and _is_manifest(key)]


async def delete_checkpoints(storage: Storage, session: SessionId, step: int | None = None) -> None:
    """Remove one checkpoint, or all that is kept of a session; manifests first, so that half of one never exists."""
    keys = [key for key in await storage.list(checkpoint_prefix(session, step)) if _OURS.fullmatch(key)]
    for key in sorted(keys, key=lambda key: (not _is_manifest(key), key)):
        await storage.delete(key)
    if step is None and await storage.exists(key := tokenizer_key(session)):
        await storage.delete(key)


async def verify_checkpoint(storage: Storage, manifest: Manifest) -> list[str]:
    """What is wrong with a checkpoint, in words, after reading all of it. Raises what storage raises when it cannot be read now."""
    problems = []
    for part in manifest.parts:
        try:
            await _read_part(storage, part)
        except DAMAGED as error:
            problems.append(error.message)
    if len(set(manifest.tensors)) < len(manifest.tensors):
        problems.append(f"{manifest.key}: two parts hold the same tensor")
    return problems


async def newest_complete(storage: Storage, session: SessionId) -> Manifest:
    """The newest checkpoint whose manifest is valid and whose parts are all there and unharmed. Raises `NotFound`.

    Reads all of it, and all of newer ones that are damaged.
    """
    problems: list[str] = []
    for key in reversed(await find_manifests(storage, session)):
        try:
            manifest = await read_manifest_at(storage, key)
            found = await verify_checkpoint(storage, manifest)
        except DAMAGED as error:
            found = [error.message]
        if not found:
            return manifest
        problems += found
    raise NotFound(f"all checkpoints of session '{session}' are damaged, the newest so: {problems[0]}", "see `dcnr checkpoint verify`")


@dataclass(frozen=True, slots=True)
class Removal:
    """What retention removes of a session: `keys` in this order, `bytes` altogether. `steps`: those of them that were checkpoints."""

    steps: tuple[int, ...]
    keys: tuple[str, ...]
    bytes: int


async def removable(storage: Storage, session: SessionId, keep: Collection[int], newest: Manifest | None = None) -> Removal:
    """What goes if, of the complete checkpoints older than `newest` (by default the newest one), only the steps `keep` stay.

    Parts of older steps without manifest go too, unless their epoch is younger: then somebody went back, and may be uploading them now.
    """
    sizes = {key: size for key, size in (await storage.sizes(checkpoint_prefix(session))).items() if _OURS.fullmatch(key)}
    complete = {step_of(key) for key in sizes if _is_manifest(key)}
    if not complete:
        return Removal((), (), 0)
    newest = newest or await read_manifest(storage, session)
    stays = complete.intersection(keep)
    keys = [key for key in sizes if step_of(key) < newest.step and step_of(key) not in stays and _epoch_of(key) <= newest.epoch]
    keys.sort(key=lambda key: (not _is_manifest(key), key))
    steps = complete.intersection(map(step_of, keys))
    return Removal(tuple(sorted(steps)), tuple(keys), sum(sizes[key] for key in keys))


async def prune(storage: Storage, session: SessionId, keep: Collection[int], newest: Manifest | None = None) -> Removal:
    """Remove what is `removable`, manifests first; and what killed writers left. Says what it was."""
    removal = await removable(storage, session, keep, newest)
    for key in removal.keys:
        await storage.delete(key)
    await storage.sweep(checkpoint_prefix(session))
    return removal


def step_of(key: str) -> int:
    """The step in the key of a manifest or part."""
    return int(key.split("/")[-2])


def _is_manifest(key: str) -> bool:
    return key.endswith(f"/{_MANIFEST_NAME}")


def _epoch_of(key: str) -> int:
    """The epoch in which a part was written; -1 for a manifest, of which there is one."""
    return -1 if _is_manifest(key) else int(key.split(".")[-2])


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
    if len(data) != part.bytes:
        raise PeerError(f"{storage.url}/{part.key} is damaged: it has {len(data)} bytes, not {part.bytes}", "use another step")
    sha256 = await asyncio.to_thread(sha256_of, [data])
    if sha256 != part.sha256:
        raise PeerError(f"{storage.url}/{part.key} is damaged: its sha256 is {sha256[:12]}…, not {part.sha256[:12]}…", "use another step")
    tensors = decode_tensors(data)
    if set(tensors) != set(part.tensors):
        raise PeerError(f"{storage.url}/{part.key} does not hold the tensors that its manifest names", "use another step")
    return tensors
