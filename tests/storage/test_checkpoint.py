"""Checkpoints: complete or not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from dcnr.errors import NotFound, PeerError, UserError, WorldError
from dcnr.ids import Epoch, PNodeId, SessionId
from dcnr.optim.hyper import Hyper
from dcnr.storage.base import Storage
from dcnr.storage.checkpoint import (
    DAMAGED,
    Manifest,
    Removal,
    delete_checkpoints,
    manifest_key,
    manifest_keys,
    newest_complete,
    part_key,
    prune,
    read_manifest,
    read_manifest_at,
    read_tensors,
    removable,
    step_of,
    verify_checkpoint,
    write_manifest,
    write_part,
)
from dcnr.storage.file import FileStorage
from dcnr.storage.tensors import Float32Array
from tests.storage.manifests import manifest_of

RUN = SessionId("run")


def tensors_of(node: str, seed: int) -> dict[str, Float32Array]:
    """A weight and its moments."""
    generator = np.random.Generator(np.random.Philox(seed))
    return {f"{node}.weight{suffix}": generator.standard_normal((3, 4), np.float32) for suffix in ("", ":m", ":v")}


async def save(storage: Storage, session: SessionId = RUN, step: int = 5, epoch: int = 1) -> Manifest:
    """A checkpoint of two PNodes; tensors depend on step and epoch."""
    parts = []
    for index, node in enumerate(("embedder", "lm_head")):
        key = part_key(session, step, PNodeId(f"p{index}"), Epoch(epoch))
        parts.append(await write_part(storage, key, tensors_of(node, 100 * step + 10 * epoch + index)))
    manifest = manifest_of(session, step, epoch, parts)
    await write_manifest(storage, manifest)
    return manifest


@pytest.fixture
def storage(tmp_path: Path) -> FileStorage:
    """Empty."""
    return FileStorage(tmp_path / "store")


async def test_a_manifest_comes_back_exactly(storage: FileStorage) -> None:
    """Every field, with its type: a float stays a float, true stays true."""
    written = await save(storage)
    read = await read_manifest(storage, RUN, 5)
    assert read == written
    assert [type(value) for value in read.hyper.values()] == [type(value) for value in written.hyper.values()]
    assert await read_manifest_at(storage, written.key) == written


async def test_keys_have_a_fixed_shape() -> None:
    """Steps sort as text, and an epoch never writes over another's part."""
    assert part_key(RUN, 12, PNodeId("p-1"), Epoch(3)) == "checkpoints/run/0000000012/p-1.3.safetensors"
    assert manifest_key(RUN, 12) == "checkpoints/run/0000000012/manifest.json"
    with pytest.raises(UserError, match="not a valid session name"):
        manifest_key(SessionId("../x"), 1)


async def test_tensors_come_back_bit_for_bit(storage: FileStorage) -> None:
    """Those that are asked for, from whichever part has them."""
    manifest = await save(storage)
    expected = tensors_of("embedder", 510) | tensors_of("lm_head", 511)
    assert manifest.tensors == tuple(sorted(expected))
    names = ["lm_head.weight:v", "embedder.weight"]
    read = await read_tensors(storage, manifest, names)
    assert set(read) == set(names)
    for name in names:
        assert read[name].tobytes() == expected[name].tobytes()
    assert await read_tensors(storage, manifest, []) == {}


async def test_a_part_is_a_safetensors_file_with_its_hash(storage: FileStorage) -> None:
    """What `SavedPart` says is what lies there."""
    part = (await save(storage)).parts[0]
    data = await storage.get(part.key)
    assert part.bytes == len(data)
    assert set(safetensors.numpy.load(bytes(data))) == set(part.tensors)


async def test_the_newest_is_taken_unless_a_step_is_named(storage: FileStorage) -> None:
    """Steps 9 and 10 are not sorted as text by accident."""
    for step in (9, 10, 0):
        await save(storage, step=step)
    assert (await read_manifest(storage, RUN)).step == 10
    assert (await read_manifest(storage, RUN, 0)).step == 0


async def test_without_manifest_there_is_no_checkpoint(storage: FileStorage) -> None:
    """Parts alone are nothing: the older one counts."""
    await save(storage, step=5)
    await write_part(storage, part_key(RUN, 6, PNodeId("p0"), Epoch(1)), tensors_of("embedder", 1))
    assert (await read_manifest(storage, RUN)).step == 5
    with pytest.raises(NotFound, match=r"no checkpoint of step 6 .*steps: 5"):
        await read_manifest(storage, RUN, 6)
    with pytest.raises(NotFound, match="session 'other' has no checkpoint"):
        await read_manifest(storage, SessionId("other"))


async def test_a_late_part_of_an_old_epoch_changes_nothing(storage: FileStorage) -> None:
    """A zombie's upload goes under a key of its own."""
    manifest = await save(storage, epoch=2)
    await write_part(storage, part_key(RUN, 5, PNodeId("p0"), Epoch(1)), tensors_of("embedder", 99))
    read = await read_tensors(storage, manifest, ["embedder.weight"])
    assert read["embedder.weight"].tobytes() == tensors_of("embedder", 520)["embedder.weight"].tobytes()


async def test_one_flipped_bit_is_found(storage: FileStorage) -> None:
    """The hash is checked at every read, and the error names the file."""
    manifest = await save(storage)
    part = manifest.parts[1]
    data = bytearray(await storage.get(part.key))
    data[-1] ^= 1
    await storage.put(part.key, data)
    await read_tensors(storage, manifest, ["embedder.weight"])
    with pytest.raises(PeerError, match=rf"{part.key} is damaged: its sha256"):
        await read_tensors(storage, manifest, ["lm_head.weight"])


async def test_a_part_that_lacks_what_its_manifest_names_is_found(storage: FileStorage) -> None:
    """Also if the hash is right."""
    manifest = await save(storage)
    lying = replace(manifest.parts[0], tensors=(*manifest.parts[0].tensors, "extra"))
    with pytest.raises(PeerError, match="does not hold the tensors"):
        await read_tensors(storage, replace(manifest, parts=(lying,)), ["extra"])


async def test_missing_names_and_parts_are_errors(storage: FileStorage) -> None:
    """Nothing is filled in."""
    manifest = await save(storage)
    with pytest.raises(NotFound, match=r"no tensor nope\.weight \(1 of 2"):
        await read_tensors(storage, manifest, ["nope.weight", "embedder.weight"])
    await storage.delete(manifest.parts[0].key)
    with pytest.raises(NotFound, match=manifest.parts[0].key):
        await read_tensors(storage, manifest, ["embedder.weight"])


async def test_a_damaged_manifest_is_named(storage: FileStorage) -> None:
    """Rather than taken for an older one."""
    manifest = await save(storage)
    await storage.put(manifest.key, b"{}")
    with pytest.raises(PeerError, match=rf"{manifest.key} is damaged"):
        await read_manifest(storage, RUN)


async def test_list_and_delete(storage: FileStorage) -> None:
    """By session and step; a session whose name another one begins with is left alone."""
    for session in (RUN, SessionId("run2")):
        for step in (1, 2):
            await save(storage, session, step)
    assert await manifest_keys(storage) == [manifest_key(session, step) for session in (RUN, SessionId("run2")) for step in (1, 2)]
    await delete_checkpoints(storage, RUN, 1)
    assert await manifest_keys(storage, RUN) == [manifest_key(RUN, 2)]
    await delete_checkpoints(storage, RUN)
    assert await manifest_keys(storage, RUN) == []
    assert len(await manifest_keys(storage)) == 2
    assert await storage.list("checkpoints/run/") == []


async def test_files_of_others_are_no_checkpoints(storage: FileStorage) -> None:
    """Notes, copies and editors' backups in the same folders are neither listed, pruned nor deleted."""
    for step in (1, 2, 3):
        await save(storage, step=step)
    foreign = ["checkpoints/run/notes.txt", "checkpoints/run/0000000001/copy-manifest.json", "checkpoints/run/old/manifest.json"]
    for key in foreign:
        await storage.put(key, b"hello")
    assert [step_of(key) for key in await manifest_keys(storage, RUN)] == [1, 2, 3]
    assert (await prune(storage, RUN, {3})).steps == (1, 2)
    await delete_checkpoints(storage, RUN)
    assert await storage.list("checkpoints/run/") == sorted(foreign)


# -- damage -----------------------------------------------------------------------------------------------------------


async def damage(storage: FileStorage, manifest: Manifest, kind: str) -> None:
    """Break one thing."""
    part = manifest.parts[1]
    data = bytes(await storage.get(part.key))
    match kind:
        case "missing":
            await storage.delete(part.key)
        case "short":
            await storage.put(part.key, data[:-1])
        case "flipped":
            await storage.put(part.key, data[:-1] + bytes([data[-1] ^ 1]))
        case "no manifest":
            await storage.delete(manifest.key)
        case "broken manifest":
            await storage.put(manifest.key, bytes(await storage.get(manifest.key))[:-10])
        case "manifest of another":
            await storage.put(manifest.key, bytes(await storage.get(manifest_key(RUN, 0))))
        case _:
            raise AssertionError(kind)


PARTS = {"missing": "there is no 'checkpoints/run/0000000009/p1.1.safetensors'", "short": "is damaged: it has", "flipped": "its sha256 is"}


@pytest.mark.parametrize(("kind", "problem"), PARTS.items())
async def test_verifying_says_what_is_wrong(storage: FileStorage, kind: str, problem: str) -> None:
    """In words that name the part; nothing of a whole one."""
    manifest = await save(storage, step=9)
    assert await verify_checkpoint(storage, manifest) == []
    await damage(storage, manifest, kind)
    (said,) = await verify_checkpoint(storage, manifest)
    assert problem in said
    assert manifest.parts[1].key in said


async def test_verifying_finds_a_tensor_that_two_parts_hold(storage: FileStorage) -> None:
    """Which of them would be loaded nobody said."""
    manifest = await save(storage)
    twice = replace(manifest, parts=(manifest.parts[0], manifest.parts[0]))
    assert await verify_checkpoint(storage, twice) == [f"{manifest.key}: two parts hold the same tensor"]


@pytest.mark.parametrize("kind", [*PARTS, "no manifest", "broken manifest", "manifest of another"])
async def test_the_newest_complete_one_is_the_newest_without_damage(storage: FileStorage, kind: str) -> None:
    """Whatever happened to a newer one."""
    for step in (0, 4, 9):
        manifest = await save(storage, step=step)
    assert (await newest_complete(storage, RUN)).step == 9
    await damage(storage, manifest, kind)
    assert (await newest_complete(storage, RUN)).step == 4


async def test_with_nothing_but_damage_there_is_none(storage: FileStorage) -> None:
    """And the first reason is told; where there is nothing at all, that is."""
    with pytest.raises(NotFound, match="session 'run' has no checkpoint"):
        await newest_complete(storage, RUN)
    for step in (1, 2):
        await damage(storage, await save(storage, step=step), "flipped")
    with pytest.raises(
        NotFound, match=r"all checkpoints of session 'run' are damaged, the newest so: .*0000000002/p1.1.safetensors is damaged"
    ):
        await newest_complete(storage, RUN)


@pytest.mark.parametrize("kind", [*PARTS, "broken manifest"])
async def test_damage_is_told_apart_from_storage_that_is_out_of_reach(storage: FileStorage, tmp_path: Path, kind: str) -> None:
    """Only the former lets anyone give a checkpoint up."""
    manifest = await save(storage, step=9)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    for attempt in (read_manifest_at(storage, manifest.key), read_tensors(storage, manifest, manifest.tensors)):
        with pytest.raises(WorldError):
            await attempt
    with pytest.raises(WorldError):
        await verify_checkpoint(storage, manifest)
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    await damage(storage, manifest, kind)
    with pytest.raises(DAMAGED):
        await read_tensors(storage, await read_manifest_at(storage, manifest.key), manifest.tensors)


# -- retention --------------------------------------------------------------------------------------------------------


async def steps_left(storage: FileStorage) -> list[int]:
    """Of complete checkpoints; each of them must be whole."""
    manifests = [await read_manifest_at(storage, key) for key in await manifest_keys(storage, RUN)]
    for manifest in manifests:
        assert await verify_checkpoint(storage, manifest) == []
    return [manifest.step for manifest in manifests]


async def test_pruning_keeps_what_it_is_told_and_always_the_newest(storage: FileStorage) -> None:
    """It says what it removed, and first what it would remove."""
    for step in (0, 10, 20, 30, 40):
        await save(storage, step=step)
    before = await storage.sizes("")
    expected = await removable(storage, RUN, Hyper(keep_last=2, keep_every=20).keeps([0, 10, 20, 30, 40]))
    assert await storage.sizes("") == before
    assert expected.steps == (10,)
    assert await prune(storage, RUN, {0, 20, 30, 40}) == expected
    assert await steps_left(storage) == [0, 20, 30, 40]
    after = await storage.sizes("")
    assert expected.bytes == sum(before.values()) - sum(after.values())
    assert (await prune(storage, RUN, ())).steps == (0, 20, 30)
    assert await steps_left(storage) == [40]
    assert await prune(storage, SessionId("nobody"), ()) == Removal((), (), 0)


async def test_manifests_go_first(storage: FileStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed while it prunes leaves no checkpoint without its parts."""
    for step in (1, 2, 3):
        await save(storage, step=step)
    whole = storage.delete
    gone: list[str] = []

    async def dying(key: str) -> None:
        if len(gone) == 3:
            raise WorldError("killed")
        gone.append(key)
        await whole(key)

    monkeypatch.setattr(storage, "delete", dying)
    with pytest.raises(WorldError, match="killed"):
        await prune(storage, RUN, ())
    assert gone[:2] == [manifest_key(RUN, 1), manifest_key(RUN, 2)]
    assert await steps_left(storage) == [3]


async def test_unfinished_checkpoints_go_once_a_newer_one_is_complete(storage: FileStorage) -> None:
    """But not one that is newer, nor one that somebody who went back to an older step may be uploading now."""

    async def upload(step: int, epoch: int) -> str:
        return (await write_part(storage, part_key(RUN, step, PNodeId("p0"), Epoch(epoch)), tensors_of("embedder", step))).key

    never = await upload(3, 1)
    assert await prune(storage, RUN, ()) == Removal((), (), 0)
    await save(storage, step=5, epoch=2)
    kept = [await upload(7, 1), await upload(5, 1), await upload(4, 3)]
    removal = await prune(storage, RUN, ())
    assert (removal.steps, removal.keys) == ((), (never,))
    assert [key for key in kept if await storage.exists(key)] == kept
    assert await steps_left(storage) == [5]


async def test_pruning_goes_by_the_checkpoint_that_it_is_given(storage: FileStorage) -> None:
    """If the newer ones are damaged, what they would make superfluous is not."""
    for step in (1, 2, 3, 4):
        await save(storage, step=step)
    removal = await prune(storage, RUN, (), await read_manifest(storage, RUN, 2))
    assert removal.steps == (1,)
    assert await steps_left(storage) == [2, 3, 4]
