"""What a deploy begins with, and whose fault it is if that fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dcnr.agents.crew import Crew
from dcnr.agents.events import SetupRefused
from dcnr.agents.execution import Execution
from dcnr.agents.plan import make_plan
from dcnr.agents.restore import find_storage, restore, setup_failed
from dcnr.backends.base import HostArray
from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.bus.messages import Deploy
from dcnr.errors import BusUnavailable, InvariantError, PeerError, UserError, WorldError
from dcnr.optim.decide import ScalerState
from dcnr.storage.base import open_storage
from dcnr.storage.checkpoint import part_key, write_manifest, write_part
from dcnr.storage.file import FileStorage
from tests.agents.bench import only_on_b
from tests.agents.tiny import SESSION, A, B, deploy_of, manifest_of

EMBEDDER = ("embedder", "lm_head")


async def saved(folder: Path) -> tuple[Deploy, dict[str, HostArray]]:
    """A checkpoint of step 3 in two parts, that of `b` with the embedder alone; the deploy of all of it to `a`, and its tensors."""
    storage = open_storage(f"file://{folder}")
    deploy = deploy_of(only_on_b(), step=3, storage=storage.url)
    execution = Execution(NumpyBackend(), Crew(1), deploy, make_plan(deploy, A))
    execution.load(None)
    tensors, _ = execution.snapshot()()
    ours = {name: tensor for name, tensor in tensors.items() if not name.startswith(EMBEDDER)}
    parts = [
        await write_part(storage, part_key(SESSION, 3, pnode, deploy.epoch), part)
        for pnode, part in ((A, ours), (B, {name: tensors[name] for name in tensors.keys() - ours.keys()}))
    ]
    manifest = manifest_of(deploy, parts, 3, ScalerState())
    await write_manifest(storage, manifest)
    return replace(deploy, checkpoint=manifest.key), tensors


class Watched(FileStorage):
    """A folder that notes what is read, or cannot be reached."""

    def __init__(self, url: str, error: Exception | None = None) -> None:
        super().__init__(Path(url.removeprefix("file://")))
        self._error = error
        self.read: list[str] = []

    async def get(self, key: str) -> bytes:
        """Note, and read."""
        if self._error:
            raise self._error
        self.read.append(key.rpartition("/")[2])
        return await super().get(key)

    async def exists(self, key: str) -> bool:
        """Look, or fail."""
        if self._error:
            raise self._error
        return await super().exists(key)


def equal(found: object, tensors: dict[str, HostArray]) -> None:
    """The very tensors."""
    assert isinstance(found, dict)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def test_only_what_is_missing_is_read(tmp_path: Path) -> None:
    """Nothing, one part, or all, depending on what is in memory; the tensors are the same."""

    async def story() -> None:
        deploy, tensors = await saved(tmp_path)
        plan = make_plan(deploy, A)
        ours = {name: tensor for name, tensor in tensors.items() if not name.startswith(EMBEDDER)}
        for kept, expected in (
            (tensors, []),
            (ours, ["manifest.json", "b.1.safetensors"]),
            ({}, ["manifest.json", "a.1.safetensors", "b.1.safetensors"]),
        ):
            storage = Watched(deploy.storage)
            equal(await restore(deploy, plan, kept, lambda _url: storage), tensors)  # noqa: B023 - awaited right here
            assert storage.read == expected

    asyncio.run(story())


def test_what_is_in_memory_of_others_is_left_behind(tmp_path: Path) -> None:
    """A part that moved away is no part of ours."""

    async def story() -> None:
        deploy, tensors = await saved(tmp_path)
        moved = replace(deploy, assignment={str(node): pnode for node, pnode in only_on_b("up").items()}, decides=False)
        found = await restore(moved, make_plan(moved, A), tensors)
        equal(found, {name: tensor for name, tensor in tensors.items() if not name.startswith("up.")})

    asyncio.run(story())


def test_what_was_read_keeps_no_part_in_memory(tmp_path: Path) -> None:
    """Each tensor owns its memory."""

    async def story() -> None:
        deploy, _ = await saved(tmp_path)
        found = await restore(deploy, make_plan(deploy, A), {})
        assert isinstance(found, dict)
        assert all(tensor.base is None for tensor in found.values())

    asyncio.run(story())


def test_without_a_checkpoint_the_seed_is_used_unless_all_is_in_memory() -> None:
    """Half a copy is none."""

    async def story() -> None:
        deploy = deploy_of(only_on_b())
        plan = make_plan(deploy, A)
        execution = Execution(NumpyBackend(), Crew(1), deploy, plan)
        execution.load(None)
        tensors, _ = execution.snapshot()()
        assert await restore(deploy, plan, {}) is None
        assert await restore(deploy, plan, {"up.weight": tensors["up.weight"]}) is None
        equal(await restore(deploy, plan, tensors), tensors)

    asyncio.run(story())


def spoil(deploy: Deploy, what: str) -> None:
    """Damage a checkpoint."""
    folder = Path(deploy.storage.removeprefix("file://")) / "checkpoints" / SESSION / "0000000003"
    match what:
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "half a manifest":
            (folder / "manifest.json").write_bytes((folder / "manifest.json").read_bytes()[:100])
        case "no part":
            (folder / "b.1.safetensors").unlink()
        case "a flipped bit":
            data = bytearray((folder / "b.1.safetensors").read_bytes())
            data[-1] ^= 1
            (folder / "b.1.safetensors").write_bytes(data)


@pytest.mark.parametrize("what", ["no manifest", "half a manifest", "no part", "a flipped bit"])
def test_a_checkpoint_that_cannot_be_used_is_damaged(tmp_path: Path, what: str) -> None:
    """The reason names the file."""

    async def story() -> None:
        deploy, _ = await saved(tmp_path)
        spoil(deploy, what)
        refused = await restore(deploy, make_plan(deploy, A), {})
        assert isinstance(refused, SetupRefused)
        assert refused.damaged
        assert "0000000003/" in refused.reason

    asyncio.run(story())


@pytest.mark.parametrize("error", [WorldError("no route"), UserError("no rights"), OSError(5, "Input/output error")])
def test_storage_out_of_reach_is_refused_with_the_reason(tmp_path: Path, error: Exception) -> None:
    """Nobody's checkpoint is damaged by that."""

    async def story() -> None:
        deploy, _ = await saved(tmp_path)
        storage = Watched(deploy.storage, error)
        probed = replace(deploy, probe="probe/x")
        for refused in (
            await restore(deploy, make_plan(deploy, A), {}, lambda _url: storage),
            await find_storage(probed, lambda _url: storage),
        ):
            assert isinstance(refused, SetupRefused)
            assert not refused.damaged
            assert deploy.storage in refused.reason
            assert str(error) in refused.reason

    asyncio.run(story())


def test_storage_that_this_version_does_not_know_is_refused() -> None:
    """The reason says what to use."""
    deploy = deploy_of(only_on_b(), step=3, storage="tape://1", checkpoint="checkpoints/run/0000000003/manifest.json")
    refused = asyncio.run(restore(deploy, make_plan(deploy, A), {}))
    assert isinstance(refused, SetupRefused)
    assert not refused.damaged
    assert "tape://1" in refused.reason


def test_a_folder_that_is_not_the_orchestrators_is_refused(tmp_path: Path) -> None:
    """The probe is not in it: the reason says what to do. With the probe, or where none is asked for, all is well."""

    async def story() -> None:
        deploy = deploy_of(only_on_b(), storage=f"file://{tmp_path}")
        assert await find_storage(deploy) is None
        probed = replace(deploy, probe="probe/abc")
        refused = await find_storage(probed)
        assert isinstance(refused, SetupRefused)
        assert not refused.damaged
        assert f"file://{tmp_path} on this host is not the folder that the orchestrator sees" in refused.reason
        assert "mount the same folder on every host" in refused.reason
        await open_storage(deploy.storage).put("probe/abc", b"here")
        assert await find_storage(probed) is None

    asyncio.run(story())


@pytest.mark.parametrize(
    ("error", "world"),
    [
        (WorldError("gone"), True), (BusUnavailable("gone"), True), (MemoryError("none left"), True), (OSError("broken"), True),
        (UserError("wrong"), False), (InvariantError("bug"), False), (KeyError("bug"), False), (PeerError("x"), False),
    ],
)  # fmt: skip
def test_other_failures_say_whether_they_are_the_worlds(error: Exception, world: bool) -> None:
    """With one line for the user, and the traceback."""
    failed = setup_failed(deploy_of(only_on_b()), error)
    assert failed.world == world
    assert (failed.session, failed.epoch) == (SESSION, 1)
    assert str(error) in failed.message
    assert type(error).__name__ in failed.traceback
