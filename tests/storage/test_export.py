"""One network in a folder: other tools read it, it comes back as it was, and what does not fit together is refused in words."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from dcnr.data.dataset import Dataset
from dcnr.data.transfer import push_dataset
from dcnr.errors import AlreadyExists, NotFound, PeerError, UserError
from dcnr.ids import SessionId
from dcnr.optim.decide import ScalerState
from dcnr.optim.hyper import Hyper
from dcnr.storage.base import Storage, open_storage
from dcnr.storage.checkpoint import delete_checkpoints, read_manifest, read_tensors, tokenizer_key, verify_checkpoint
from dcnr.storage.export import export_folder, import_folder, imported_tokenizer, read_folder, tokenizer_of
from dcnr.storage.file import FileStorage
from dcnr.text.tokenizer import Tokenizer, add_tokenizer, no_progress
from tests.storage.exports import SMALL, save_network, weights_of

RUN, MINE = SessionId("run"), SessionId("mine")
TEXT = "abcd bcda cdab " * 40


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """With a dataset `books` of five characters."""
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    folder = tmp_path / "data"
    add_tokenizer(folder, "chars", Tokenizer.train([file], "char"))
    Dataset.create(folder, "books", [file], "chars", seq_len=6)
    return folder


@pytest.fixture
async def storage(tmp_path: Path) -> FileStorage:
    """With checkpoints of `run` at steps 0 and 5."""
    found = FileStorage(tmp_path / "storage")
    await save_network(found, RUN, SMALL, 0)
    await save_network(found, RUN, SMALL, 5)
    return found


@pytest.fixture
async def exported(storage: FileStorage, data_dir: Path, tmp_path: Path) -> Path:
    """The newest checkpoint of `run` in a folder."""
    await export_folder(storage, data_dir, RUN, None, tmp_path / "exported")
    return tmp_path / "exported"


def rewritten(folder: Path, name: str, data: bytes) -> None:
    """Replace a file of an exported folder, and its hash."""
    (folder / name).write_bytes(data)
    described(folder, lambda it: it["files"].update({name: hashlib.sha256(data).hexdigest()}))


def described(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change `dcnr.json`."""
    description = json.loads((folder / "dcnr.json").read_text())
    change(description)
    (folder / "dcnr.json").write_text(json.dumps(description))


def with_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the weights, and the hash with them."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    change(tensors)
    rewritten(folder, "model.safetensors", safetensors.numpy.save(tensors))


async def test_a_folder_holds_weights_network_tokenizer_and_what_they_are(exported: Path, data_dir: Path) -> None:
    """Canonical names without moments, a tied matrix once; the text of the file; hashes of all."""
    weights = safetensors.numpy.load_file(exported / "model.safetensors")
    assert set(weights) == {"embed.weight", "embed.position_weight", "up.weight", "up.bias", "head.bias"}
    for name, value in weights_of(SMALL, 5).items():
        np.testing.assert_array_equal(weights[name], value)
    with safetensors.safe_open(exported / "model.safetensors", "numpy") as file:
        metadata = file.metadata()
    assert metadata == {"format": "pt", "network": "small", "session": "run", "step": "5", "tied": '{"head.weight": "embed.weight"}'}
    assert (exported / "network.yml").read_text() == SMALL
    assert (exported / "tokenizer.json").read_bytes() == (data_dir / "tokenizers/chars/tokenizer.json").read_bytes()
    description = json.loads((exported / "dcnr.json").read_text())
    assert description["tied"] == {"head.weight": "embed.weight"}
    assert [description[key] for key in ("version", "session", "step", "network", "dataset", "tokenizer")] == [
        1, "run", 5, "small", "books", "chars",
    ]  # fmt: skip
    files = {name: hashlib.sha256((exported / name).read_bytes()).hexdigest() for name in description["files"]}
    assert description["files"] == files
    assert sorted([*files, "dcnr.json"]) == sorted(path.name for path in exported.iterdir())


async def test_the_file_is_read_by_pytorch(exported: Path) -> None:
    """By the library's own loader."""
    torch = pytest.importorskip("torch")
    loaded = pytest.importorskip("safetensors.torch").load_file(exported / "model.safetensors")
    assert {value.dtype for value in loaded.values()} == {torch.float32}
    assert loaded["up.weight"].numpy().tobytes() == weights_of(SMALL, 5)["up.weight"].tobytes()


async def test_a_step_may_be_chosen(storage: FileStorage, data_dir: Path, tmp_path: Path) -> None:
    """0 is before training."""
    description, _ = await export_folder(storage, data_dir, RUN, 0, tmp_path / "zero")
    assert description.step == 0
    found = safetensors.numpy.load_file(tmp_path / "zero" / "model.safetensors")
    np.testing.assert_array_equal(found["up.weight"], weights_of(SMALL, 0)["up.weight"])


async def test_without_its_dataset_a_session_is_exported_without_a_tokenizer(storage: FileStorage, tmp_path: Path) -> None:
    """And why is said."""
    description, missing = await export_folder(storage, tmp_path / "nothing", RUN, None, tmp_path / "bare")
    assert "no dataset 'books'" in missing
    assert description.tokenizer is None
    assert not (tmp_path / "bare" / "tokenizer.json").exists()
    assert read_folder(tmp_path / "bare").tokenizer is None


async def test_nothing_is_overwritten_and_nothing_half_written_stays(storage: FileStorage, data_dir: Path, tmp_path: Path) -> None:
    """An empty folder is taken; one with files is not; a damaged checkpoint leaves none."""
    full, empty = tmp_path / "full", tmp_path / "empty"
    full.mkdir()
    (full / "mine").touch()
    with pytest.raises(AlreadyExists, match="not an empty folder"):
        await export_folder(storage, data_dir, RUN, None, full)
    assert [path.name for path in full.iterdir()] == ["mine"]
    empty.mkdir()
    await export_folder(storage, data_dir, RUN, None, empty)
    part = (await read_manifest(storage, RUN)).parts[0]
    await storage.put(part.key, bytes(part.bytes))
    before = set(tmp_path.iterdir())
    with pytest.raises(PeerError, match="is damaged"):
        await export_folder(storage, data_dir, RUN, None, tmp_path / "new")
    assert set(tmp_path.iterdir()) == before


async def round_trip(storage: Storage, exported: Path) -> None:
    """Import into `storage`: the weights to the bit, moments of zero where the optimizer has some, a scaler that starts anew."""
    manifest = await import_folder(storage, read_folder(exported), MINE)
    assert manifest == await read_manifest(storage, MINE)
    assert (manifest.step, manifest.network, manifest.network_file, manifest.dataset) == (5, "small", SMALL, "books")
    assert (manifest.seed, manifest.total_steps, manifest.batch, manifest.micro_batches, manifest.fuse) == (7, 100, 8, 2, True)
    assert manifest.state == ScalerState()
    assert Hyper.model_validate(manifest.hyper) == Hyper(optimizer="adamw", lr=0.01, momentum=0.0)
    assert await verify_checkpoint(storage, manifest) == []
    weights = weights_of(SMALL, 5)
    tensors = await read_tensors(storage, manifest, manifest.tensors)
    trained_by_sgd = {"up.weight", "up.bias"}
    assert set(tensors) == weights.keys() | {f"{name}:{moment}" for name in weights.keys() - trained_by_sgd for moment in "mv"}
    for name, value in tensors.items():
        np.testing.assert_array_equal(value, np.zeros_like(value) if ":" in name else weights[name])


async def test_a_folder_comes_back_as_it_was(exported: Path, tmp_path: Path) -> None:
    """To another storage, and out again."""
    elsewhere = FileStorage(tmp_path / "elsewhere")
    await round_trip(elsewhere, exported)
    await export_folder(elsewhere, tmp_path / "nothing", MINE, None, tmp_path / "again")
    for name in ("network.yml", "tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (exported / name).read_bytes()
    first, second = (safetensors.numpy.load_file(folder / "model.safetensors") for folder in (exported, tmp_path / "again"))
    assert {name: value.tobytes() for name, value in first.items()} == {name: value.tobytes() for name, value in second.items()}


@pytest.mark.timeout(120)
async def test_a_folder_comes_back_from_a_bucket(exported: Path, bucket_url: str) -> None:
    """The same through S3; a deleted session leaves nothing there."""
    bucket = open_storage(bucket_url)
    await round_trip(bucket, exported)
    await delete_checkpoints(bucket, MINE)
    assert await bucket.list("checkpoints/") == []


async def test_an_imported_session_keeps_its_tokenizer(exported: Path, data_dir: Path, tmp_path: Path) -> None:
    """Beside its checkpoints, wins over that of a dataset of the same name, and goes with the session."""
    storage = FileStorage(tmp_path / "elsewhere")
    manifest = await import_folder(storage, read_folder(exported), MINE)
    assert (await tokenizer_of(storage, tmp_path / "nothing", manifest)).encode("abcd") == [1, 2, 3, 4]
    assert await imported_tokenizer(storage, RUN) is None
    await storage.put(tokenizer_key(MINE), Tokenizer.load(data_dir / "tokenizers/chars/tokenizer.json").to_json()[:-9].encode())
    with pytest.raises(UserError, match=r"checkpoints/mine/tokenizer.json is not a tokenizer.json"):
        await tokenizer_of(storage, data_dir, manifest)
    await delete_checkpoints(storage, MINE)
    assert (await tokenizer_of(storage, data_dir, manifest)).encode("abcd") == [1, 2, 3, 4]
    with pytest.raises(NotFound, match="no dataset 'books'"):
        await tokenizer_of(storage, tmp_path / "nothing", manifest)


async def test_a_dataset_of_the_storage_says_what_ids_mean(storage: FileStorage, data_dir: Path, tmp_path: Path) -> None:
    """On a machine that has none of it, and on one that has read a part of it."""
    await push_dataset(data_dir, "books", storage, no_progress)
    manifest, there = await read_manifest(storage, RUN), tmp_path / "there"
    for shard in ("train-00000.bin", "validation-00000.bin"):
        assert (await tokenizer_of(storage, there, manifest)).encode("abcd") == [1, 2, 3, 4]
        (there / "datasets" / "books" / shard).write_bytes(await storage.get(f"datasets/books/{shard}"))
    _, missing = await export_folder(storage, tmp_path / "another", RUN, None, tmp_path / "whole")
    assert not missing


async def test_a_name_that_is_taken_is_refused(exported: Path, storage: FileStorage) -> None:
    """Its checkpoints stay as they are."""
    before = await storage.sizes("checkpoints/")
    with pytest.raises(AlreadyExists, match="there are checkpoints of a session 'run'"):
        await import_folder(storage, read_folder(exported), RUN)
    assert await storage.sizes("checkpoints/") == before


async def test_another_dataset_may_be_named(exported: Path, tmp_path: Path) -> None:
    """It stands in the manifest."""
    assert (await import_folder(FileStorage(tmp_path / "elsewhere"), read_folder(exported), MINE, "other")).dataset == "other"


@pytest.mark.parametrize("name", ["dcnr.json", "model.safetensors", "network.yml", "tokenizer.json"])
async def test_a_file_that_is_missing_is_named(exported: Path, name: str) -> None:
    """Each of them."""
    (exported / name).unlink()
    with pytest.raises(NotFound, match=f"{name}"):
        read_folder(exported)


@pytest.mark.parametrize("name", ["model.safetensors", "network.yml", "tokenizer.json"])
async def test_a_file_that_is_not_what_was_exported_is_named(exported: Path, name: str) -> None:
    """One byte more is enough."""
    (exported / name).write_bytes((exported / name).read_bytes() + b"\n")
    with pytest.raises(UserError, match=f"{name} is not what was exported: its sha256 is"):
        read_folder(exported)


async def test_every_tensor_that_does_not_fit_is_told_at_once(exported: Path) -> None:
    """Missing, left over, tied, of another shape, of another dtype."""

    def change(tensors: dict[str, Any]) -> None:
        tensors["head.weight"], tensors["stranger"] = tensors["embed.weight"].copy(), np.zeros(3, np.float32)
        del tensors["up.bias"]
        tensors["up.weight"] = np.zeros((4, 5), np.float32)
        tensors["head.bias"] = tensors["head.bias"].astype(np.float16)

    with_tensors(exported, change)
    with pytest.raises(UserError) as caught:
        read_folder(exported)
    assert caught.value.message == (
        f"{exported}/model.safetensors does not fit network 'small': 'up.bias' [4] is missing; "
        "'head.weight' is tied to 'embed.weight', under which it stands once; 'stranger' belongs to no node of the network; "
        "'up.weight' is F32 [4, 5] and should be F32 [4, 4]; 'head.bias' is F16 [8] and should be F32 [8]"
    )


async def test_many_problems_are_counted(exported: Path) -> None:
    """Eight are told."""
    with_tensors(exported, lambda tensors: tensors.update({f"x{index}": np.zeros(1, np.float32) for index in range(20)}))
    with pytest.raises(UserError, match="'x15' belongs to no node of the network; and 12 more"):
        read_folder(exported)


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, (9).to_bytes(8, "little") + b"{}"])
async def test_what_is_no_safetensors_file_is_refused(exported: Path, data: bytes) -> None:
    """Although its hash is right."""
    rewritten(exported, "model.safetensors", data)
    with pytest.raises(UserError, match="is not a safetensors file"):
        read_folder(exported)


async def test_a_network_file_that_does_not_load_is_refused_with_its_place(exported: Path) -> None:
    """As `dcnr network validate` says it."""
    rewritten(exported, "network.yml", SMALL.replace("type: relu", "type: rulu").encode())
    with pytest.raises(UserError, match=r"network.yml:5:\d+: node 'act': unknown type 'rulu'"):
        read_folder(exported)
    rewritten(exported, "network.yml", b"\xff")
    with pytest.raises(UserError, match=r"network.yml: invalid UTF-8 at byte 0"):
        read_folder(exported)


async def test_a_tokenizer_with_more_ids_than_the_network_is_refused(exported: Path, tmp_path: Path) -> None:
    """The node is named."""
    (tmp_path / "wide.txt").write_text("abcdefghijkl")
    rewritten(exported, "tokenizer.json", Tokenizer.train([tmp_path / "wide.txt"], "char").to_json().encode())
    with pytest.raises(UserError, match="has 12 ids, node 'embed' of network 'small' knows 8"):
        read_folder(exported)
    rewritten(exported, "tokenizer.json", b"{}")
    with pytest.raises(UserError, match=r"is not a tokenizer.json"):
        read_folder(exported)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda it: it.update(version=2), r"dcnr.json: version: Input should be 1"),
        (lambda it: it.update(step=-1), r"dcnr.json: step: Input should be greater"),
        (lambda it: it.pop("training"), r"dcnr.json: training: Field required"),
        (lambda it: it["training"]["hyper"].update(lr=-1), r"dcnr.json: training.hyper.lr: Input should be greater than 0"),
        (lambda it: it["training"]["hyper"].update(rate=1), r"dcnr.json: training.hyper.rate: Extra inputs are not permitted"),
        (lambda it: it["training"].update(batch=9), r"a batch of 9 cannot be cut into 2 equal micro-batches"),
        (lambda it: it["files"].pop("network.yml"), r"dcnr.json names no network.yml"),
        (lambda it: it["files"].pop("tokenizer.json"), r"tokenizer.json is not named in dcnr.json"),
        (lambda it: it["files"].update({"../../secret": "00"}), r"dcnr.json: files"),
    ],
)
async def test_a_description_that_makes_no_sense_is_refused(exported: Path, change: Callable[[dict[str, Any]], object], told: str) -> None:
    """With the place in it."""
    described(exported, change)
    with pytest.raises(UserError, match=told):
        read_folder(exported)


async def test_what_is_no_json_is_refused(exported: Path) -> None:
    """With its file."""
    (exported / "dcnr.json").write_text("{")
    with pytest.raises(UserError, match=r"dcnr.json: it: Invalid JSON"):
        read_folder(exported)
