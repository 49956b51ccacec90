"""Checkpoints: complete or not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from dcnr.errors import NotFound, PeerError, UserError
from dcnr.ids import Epoch, NetworkId, PNodeId, SessionId
from dcnr.optim.decide import ScalerState
from dcnr.storage.checkpoint import (
    Manifest,
    delete_checkpoints,
    export_safetensors,
    list_checkpoints,
    manifest_key,
    part_key,
    read_manifest,
    read_manifest_at,
    read_tensors,
    write_manifest,
    write_part,
)
from dcnr.storage.file import FileStorage
from dcnr.storage.tensors import Float32Array

RUN = SessionId("run")
NETWORK = "name: net\nnodes: []  # é\n"


def tensors_of(node: str, seed: int) -> dict[str, Float32Array]:
    """A weight and its moments."""
    generator = np.random.Generator(np.random.Philox(seed))
    return {f"{node}.weight{suffix}": generator.standard_normal((3, 4), np.float32) for suffix in ("", ":m", ":v")}


async def save(storage: FileStorage, session: SessionId = RUN, step: int = 5, epoch: int = 1) -> Manifest:
    """A checkpoint of two PNodes; tensors depend on step and epoch."""
    parts = []
    for index, node in enumerate(("embedder", "lm_head")):
        key = part_key(session, step, PNodeId(f"p{index}"), Epoch(epoch))
        parts.append(await write_part(storage, key, tensors_of(node, 100 * step + 10 * epoch + index)))
    manifest = Manifest(
        session=session,
        network=NetworkId("net"),
        network_file=NETWORK,
        dataset="books",
        step=step,
        epoch=Epoch(epoch),
        seed=7,
        total_steps=100,
        batch=8,
        micro_batches=2,
        fuse=True,
        hyper={"optimizer": "adamw", "lr": 0.1 + 0.2, "decay_steps": None, "shards": 2, "flag": True, "eps": 1.0},
        state=ScalerState(updates=4, loss_scale=2.0**15, good_steps=3, dynamic=True),
        parts=tuple(parts),
        kernel="SkylakeX",
        created="2026-01-01T00:00:00+00:00",
        dcnr_version="0.1.0",
    )
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
    assert set(safetensors.numpy.load(data)) == set(part.tensors)


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
    assert [(one.session, one.step) for one in await list_checkpoints(storage)] == [("run", 1), ("run", 2), ("run2", 1), ("run2", 2)]
    await delete_checkpoints(storage, RUN, 1)
    assert [one.step for one in await list_checkpoints(storage, RUN)] == [2]
    await delete_checkpoints(storage, RUN)
    assert await list_checkpoints(storage, RUN) == []
    assert len(await list_checkpoints(storage)) == 2
    assert await storage.list("checkpoints/run/") == []


async def test_export_holds_the_weights_and_what_they_belong_to(storage: FileStorage, tmp_path: Path) -> None:
    """One file, canonical names, no moments; network file and session as metadata."""
    await save(storage, step=0)
    await save(storage, step=5)
    out = tmp_path / "out" / "weights.safetensors"
    manifest = await export_safetensors(storage, RUN, 0, out)
    assert manifest.step == 0
    exported = safetensors.numpy.load_file(out)
    assert set(exported) == {"embedder.weight", "lm_head.weight"}
    assert exported["lm_head.weight"].tobytes() == tensors_of("lm_head", 11)["lm_head.weight"].tobytes()
    with safetensors.safe_open(out, "numpy") as file:
        metadata = file.metadata()
    assert metadata["network_file"] == NETWORK
    assert (metadata["session"], metadata["step"], metadata["dataset"]) == ("run", "0", "books")
    assert (await export_safetensors(storage, RUN, None, out)).step == 5
