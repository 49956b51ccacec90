"""`dcnr checkpoint`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import safetensors.numpy
from click.testing import CliRunner, Result
from safetensors.numpy import load_file

from dcnr.bus import api, subjects
from dcnr.bus.messages import ValidationMetrics
from dcnr.bus.nats import connect
from dcnr.cli.checkpoint import _prune
from dcnr.cli.main import main
from dcnr.errors import NotFound
from dcnr.ids import SessionId
from dcnr.metrics.history import Validations
from dcnr.optim.hyper import Hyper
from dcnr.storage.file import FileStorage
from tests.cli.conftest import TINY, Cluster
from tests.orchestrator.running import make_data
from tests.storage.exports import SMALL, save_network, weights_of
from tests.storage.test_checkpoint import save


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data directory `data` with checkpoints of `run` at 0 and 5 and of `other` at 3."""
    storage = FileStorage(tmp_path / "data")
    for session, step in (("run", 0), ("run", 5), ("other", 3)):
        asyncio.run(save(storage, SessionId(session), step))
    return tmp_path


def dcnr(folder: Path, *arguments: str) -> Result:
    """Run `dcnr checkpoint …` on the data directory in `folder`, where no server runs."""
    environ = {"DCNR_DATA_DIR": str(folder / "data"), "DCNR_STORAGE": "", "NATS_URL": "nats://127.0.0.1:1"}
    return CliRunner().invoke(main, ["checkpoint", *arguments], env=environ)


def damaged(folder: Path, step: int) -> Path:
    """A part of `run` at `step` that was just cut short."""
    part = next((folder / f"data/checkpoints/run/{step:010d}").glob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1])
    return part


def steps(folder: Path) -> list[int]:
    """Of the checkpoints of `run`."""
    return [one["step"] for one in json.loads(dcnr(folder, "list", "run", "--json").stdout)["checkpoints"]]


def test_list_shows_all_or_those_of_a_session(folder: Path) -> None:
    """By session and step."""
    listed = json.loads(dcnr(folder, "list", "--json").stdout)["checkpoints"]
    assert [(one["session"], one["step"]) for one in listed] == [("other", 3), ("run", 0), ("run", 5)]
    assert listed[0]["tensors"] == 6
    lines = dcnr(folder, "list", "run").stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["session", "step"], ["run", "0"], ["run", "5"]]
    assert dcnr(folder, "list", "nobody").stdout == "no checkpoints\n"


@pytest.mark.parametrize(("source", "step"), [("small", 5), ("small@0", 0)])
def test_export_writes_a_folder(folder: Path, source: str, step: int) -> None:
    """Of the newest step, or of that one, 0 included; why there is no tokenizer is told beside the result."""
    for at in (0, 5):
        asyncio.run(save_network(FileStorage(folder / "data"), SessionId("small"), SMALL, at))
    out = folder / "out"
    result = dcnr(folder, "export", source, str(out), "--json")
    assert json.loads(result.stdout) == {
        "folder": str(out), "session": "small", "step": step, "network": "small",
        "files": ["model.safetensors", "network.yml", "dcnr.json"],
    }  # fmt: skip
    assert result.stderr.startswith("without tokenizer.json: there is no dataset 'books' in")
    assert set(safetensors.numpy.load_file(out / "model.safetensors")) == weights_of(SMALL).keys()
    again = dcnr(folder, "export", source, str(out))
    assert again.exit_code == 2
    assert "exists and is not an empty folder" in again.stderr


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nobody", "session 'nobody' has no checkpoint in"),
        ("run@4", "no checkpoint of step 4"),
        ("run@last", "'last' is not a step (use run@400, or run for the newest)"),
        ("run@", "'' is not a step"),
        ("../run", "'../run' is not a valid session name"),
    ],
)
def test_what_is_not_there_is_one_line_and_code_2(folder: Path, source: str, message: str) -> None:
    """And no folder."""
    result = dcnr(folder, "export", source, str(folder / "out"))
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (folder / "out").exists()


def test_a_damaged_part_is_code_1_and_no_folder(folder: Path) -> None:
    """It is not the user's fault."""
    asyncio.run(save_network(FileStorage(folder / "data"), SessionId("small"), SMALL))
    (part,) = (folder / "data/checkpoints/small/0000000005").glob("*.safetensors")
    part.write_bytes(part.read_bytes()[:-1])
    result = dcnr(folder, "export", "small", str(folder / "out"))
    assert result.exit_code == 1
    assert "is damaged" in result.stderr
    assert not (folder / "out").exists()


def test_a_folder_that_is_none_is_refused_with_nothing_running(folder: Path) -> None:
    """What is missing is named; without an orchestrator even a good folder cannot be imported, and nothing is written."""
    told = dcnr(folder, "import", str(folder), "--session", "mine")
    assert told.exit_code == 2
    assert "dcnr.json" in told.stderr
    asyncio.run(save_network(FileStorage(folder / "data"), SessionId("small"), SMALL))
    dcnr(folder, "export", "small", str(folder / "out"))
    told = dcnr(folder, "import", str(folder / "out"), "--session", "mine")
    assert told.exit_code == 2
    assert "nats://127.0.0.1:1" in told.stderr
    assert not (folder / "data/checkpoints/mine").exists()


@pytest.mark.nats
@pytest.mark.timeout(180)
def test_an_imported_session_trains_on_as_the_one_that_was_exported(cluster: Cluster, book: Path, tmp_path: Path) -> None:
    """1. three steps, exported; 2. imported under a new name, and taken; 3. both resumed: the next step begins with the same weights on the
    same batch, so its loss is the same to the bit; 4. what the new one has learned is exported in turn."""
    cluster.dcnr("train", TINY, "--text", str(book), "--steps", "3", "--batch", "4", "--session", "origin", "--json")
    out = tmp_path / "out"
    exported = cluster.json("checkpoint", "export", "origin", str(out))
    assert exported["files"] == ["model.safetensors", "network.yml", "tokenizer.json", "dcnr.json"]

    imported = cluster.json("checkpoint", "import", str(out), "--session", "copy")
    assert (imported["session"], imported["state"], imported["step"]) == ("copy", "suspended", 3)
    shown = cluster.json("session", "show", "copy")
    assert (shown["state"], shown["step"], shown["checkpoints"]) == ("suspended", 3, [3])
    assert "session 'copy' exists" in cluster.dcnr("checkpoint", "import", str(out), "--session", "copy", code=2).output
    assert "ask for more steps" in cluster.dcnr("session", "resume", "copy", code=2).output

    losses = []
    for session in ("origin", "copy"):
        cluster.dcnr("session", "resume", session, "--steps", "5")
        rows = [json.loads(line) for line in cluster.dcnr("session", "watch", session, "--json").stdout.splitlines()]
        assert rows[-1]["event"] == "done"
        losses.append({row["step"]: row["loss"] for row in rows if row["event"] == "step"})
    assert losses[0][4] == losses[1][4]
    assert losses[0][5] != losses[1][5]
    assert cluster.json("checkpoint", "export", "copy", str(tmp_path / "again"))["step"] == 5


@pytest.mark.nats
@pytest.mark.timeout(120)
def test_what_the_orchestrator_refuses_leaves_nothing_in_storage(cluster: Cluster, tmp_path: Path) -> None:
    """A dataset that does not exist; without naming one the session is made, and says that it cannot be trained on."""
    asyncio.run(save_network(FileStorage(tmp_path / "other"), SessionId("small"), SMALL, dataset="unheard-of"))
    cluster.dcnr("checkpoint", "export", "small", str(tmp_path / "out"), "--storage", f"file://{tmp_path}/other")
    arguments = ("checkpoint", "import", str(tmp_path / "out"), "--session", "lonely")
    assert "no dataset 'nix'" in cluster.dcnr(*arguments, "--dataset", "nix", code=2).output
    assert not (cluster.data_dir / "checkpoints" / "lonely").exists()
    assert "it cannot be trained on: there is no dataset 'unheard-of'" in cluster.json(*arguments)["reason"]
    assert "no dataset 'unheard-of'" in cluster.dcnr("session", "resume", "lonely", "--steps", "200", code=2).output
    assert cluster.json("session", "show", "lonely")["state"] == "suspended"
    cluster.dcnr("session", "delete", "lonely")
    assert not (cluster.data_dir / "checkpoints" / "lonely").exists()


def test_another_storage_is_named_by_its_url(folder: Path, tmp_path: Path) -> None:
    """In place of the data directory, by every command."""
    asyncio.run(save(FileStorage(tmp_path / "elsewhere"), SessionId("run"), 7))
    there = ("--storage", f"file://{tmp_path}/elsewhere", "--json")
    assert [one["step"] for one in json.loads(dcnr(folder, "list", *there).stdout)["checkpoints"]] == [7]
    assert [one["step"] for one in json.loads(dcnr(folder, "verify", "run", *there).stdout)["checkpoints"]] == [7]
    assert json.loads(dcnr(folder, "prune", "run", "--keep-last", "1", *there).stdout)["kept"] == [7]
    asyncio.run(save_network(FileStorage(tmp_path / "elsewhere"), SessionId("small"), SMALL, 8))
    assert json.loads(dcnr(folder, "export", "small", str(tmp_path / "out"), *there).stdout)["step"] == 8


def test_list_shows_a_damaged_manifest_beside_the_others(folder: Path) -> None:
    """One bad file hides nothing."""
    (folder / "data/checkpoints/run/0000000000/manifest.json").write_bytes(b"{}")
    first, second = json.loads(dcnr(folder, "list", "run", "--json").stdout)["checkpoints"]
    assert (first["step"], second["step"], second["problem"]) == (0, 5, "")
    assert "manifest.json is damaged" in first["problem"]
    assert "is damaged" in dcnr(folder, "list", "run").stdout


def test_verify_says_ok(folder: Path) -> None:
    """For each checkpoint, or for one."""
    result = dcnr(folder, "verify", "run")
    assert result.exit_code == 0
    assert [line.split() for line in result.stdout.splitlines()[1:]] == [["run", "0", "ok"], ["run", "5", "ok"]]
    (one,) = json.loads(dcnr(folder, "verify", "run", "--step", "5", "--json").stdout)["checkpoints"]
    assert (one["session"], one["step"], one["state"], one["problems"]) == ("run", 5, "ok", [])


def test_verify_names_what_is_damaged_and_ends_with_code_1(folder: Path) -> None:
    """Parts and manifests; the others are still looked at."""
    part = damaged(folder, 5)
    (folder / "data/checkpoints/run/0000000000/manifest.json").write_bytes(b"{}")
    asyncio.run(save(FileStorage(folder / "data"), SessionId("run"), 9))
    result = dcnr(folder, "verify", "run", "--json")
    assert result.exit_code == 1
    zero, five, nine = json.loads(result.stdout)["checkpoints"]
    assert (zero["state"], five["state"], nine["state"]) == ("damaged", "damaged", "ok")
    assert "manifest.json is damaged" in zero["problems"][0]
    assert f"{part.name} is damaged" in five["problems"][0]
    assert dcnr(folder, "verify", "run", "--step", "9").exit_code == 0


@pytest.mark.parametrize(("more", "message"), [(("nobody",), "has no checkpoint in"), (("run", "--step", "4"), "no checkpoint of step 4")])
def test_verify_of_nothing_is_code_2(folder: Path, more: tuple[str, ...], message: str) -> None:
    """It is no success."""
    result = dcnr(folder, "verify", *more)
    assert result.exit_code == 2
    assert message in result.stderr


def test_prune_keeps_the_newest_and_says_what_went(folder: Path) -> None:
    """A dry run says the same and removes nothing."""
    for step in (10, 20, 25):
        asyncio.run(save(FileStorage(folder / "data"), SessionId("run"), step))
    arguments = ("prune", "run", "--keep-last", "1", "--keep-every", "10", "--json")
    dry = json.loads(dcnr(folder, *arguments, "--dry-run").stdout)
    assert steps(folder) == [0, 5, 10, 20, 25]
    wet = json.loads(dcnr(folder, *arguments).stdout)
    assert steps(folder) == wet["kept"] == [0, 10, 20, 25]
    assert dry == wet | {"dry_run": True}
    assert (wet["removed"], wet["blobs"]) == ([5], 3)
    assert wet["bytes"] > 0
    assert dcnr(folder, "verify", "run").exit_code == 0


def test_prune_never_removes_the_newest_that_can_be_read(folder: Path) -> None:
    """Newer ones that are damaged do not count."""
    for step in (10, 20):
        asyncio.run(save(FileStorage(folder / "data"), SessionId("run"), step))
    damaged(folder, 10)
    damaged(folder, 20)
    assert json.loads(dcnr(folder, "prune", "run", "--keep-last", "1", "--json").stdout)["removed"] == [0]
    assert steps(folder) == [5, 10, 20]
    damaged(folder, 5)
    result = dcnr(folder, "prune", "run", "--keep-last", "1")
    assert result.exit_code == 2
    assert "all checkpoints of session 'run' are damaged" in result.stderr
    assert steps(folder) == [5, 10, 20]


BEST_AT_5 = {"best": {"step": 5, "loss": 1.0}, "kept": 5}
NOT_VALIDATED = {"best": None, "kept": None}


def test_prune_spares_the_best_validation_that_the_log_knows(folder: Path) -> None:
    """Where nobody answers. That of one that has no checkpoint is of no use: then that of the best one before it stays."""
    for step in (10, 20):
        asyncio.run(save(FileStorage(folder / "data"), SessionId("run"), step))
    rows = [(0, 3.0, True), (5, 2.0, True), (10, 2.5, False), (15, 1.0, True), (20, 2.0, False)]
    Validations(folder / "data").append([ValidationMetrics(SessionId("run"), step, loss, 2.0, 1.0, 8, best) for step, loss, best in rows])
    assert dcnr(folder, "prune", "run", "--keep-last", "1").exit_code == 0
    assert steps(folder) == [5, 20]


@pytest.mark.parametrize(
    ("known", "validated", "kept"),
    [
        ([0, 5], NOT_VALIDATED, [5, 10, 20]),
        ([0, 5, 10, 20], NOT_VALIDATED, [20]),
        ([0, 5, 10, 20], BEST_AT_5, [5, 20]),
        ([0, 5, 10, 20], {"best": {"step": 10, "loss": 0.5}, "kept": 5}, [5, 10, 20]),
        ([], NOT_VALIDATED, [20]),
        (None, {}, [20]),
    ],
)
async def test_prune_spares_what_the_session_needs(
    folder: Path,
    nats_url: str,
    monkeypatch: pytest.MonkeyPatch,
    known: list[int] | None,
    validated: dict[str, object],
    kept: list[int],
) -> None:
    """What the orchestrator has as its newest, and all after it, and its best; what it does not know at all, storage alone decides."""
    for step in (10, 20):
        await save(FileStorage(folder / "data"), SessionId("run"), step)
    monkeypatch.setenv("NATS_URL", nats_url)

    async def answer(data: bytes) -> bytes:
        assert api.arguments(data) == {"session": "run"}
        return api.failure(NotFound("no session 'run'")) if known is None else api.ok({"checkpoints": known, **validated})

    bus = await connect(nats_url, "an-orchestrator")
    try:
        service = await bus.serve(subjects.api("session.show"), answer)
        rule, data = Hyper(keep_last=1), folder / "data"
        newest, removal = await _prune(FileStorage(data), data, SessionId("run"), rule, dry_run=True)
        await service.stop()
    finally:
        await bus.close()
    assert newest == kept
    assert set(removal.steps) == {0, 5, 10, 20}.difference(kept)


def test_outputs_are_written_for_other_tools(folder: Path) -> None:
    """As safetensors, whole or not at all; what cannot be is told."""
    data = folder / "data"
    make_data(data)
    asyncio.run(save_network(FileStorage(data), SessionId("small"), SMALL + "outputs: [{name: logits, node_id: head}]", dataset="text"))
    out = folder / "out.safetensors"
    shown = json.loads(dcnr(folder, "outputs", "small@5", str(out), "--rows", "2", "--json").stdout)
    assert shown["shapes"] == {"ids": [2, 6], "logits": [2, 6, 8]}
    assert {name: list(array.shape) for name, array in load_file(out).items()} == shown["shapes"]
    assert "logits" in dcnr(folder, "outputs", "small", str(out)).stdout
    refused = dcnr(folder, "outputs", "small", str(out / "below"))
    assert (refused.exit_code, "out.safetensors" in refused.stderr) == (2, True)


@pytest.mark.parametrize("command", ["list", "verify", "prune", "export", "import", "outputs"])
def test_help_shows_an_example(folder: Path, command: str) -> None:
    """Of every command."""
    assert f"Example:\n    dcnr checkpoint {command}" in dcnr(folder, command, "--help").output
