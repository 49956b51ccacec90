"""`dcnr checkpoint`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import safetensors.numpy
from click.testing import CliRunner, Result

from dcnr.cli.main import main
from dcnr.ids import SessionId
from dcnr.storage.file import FileStorage
from tests.storage.test_checkpoint import save


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data directory `data` with checkpoints of `run` at 0 and 5 and of `other` at 3."""
    storage = FileStorage(tmp_path / "data")
    for session, step in (("run", 0), ("run", 5), ("other", 3)):
        asyncio.run(save(storage, SessionId(session), step))
    return tmp_path


def dcnr(folder: Path, *arguments: str) -> Result:
    """Run `dcnr checkpoint …` on the data directory in `folder`."""
    return CliRunner().invoke(main, ["checkpoint", *arguments], env={"DCNR_DATA_DIR": str(folder / "data")})


def test_list_shows_all_or_those_of_a_session(folder: Path) -> None:
    """By session and step."""
    listed = json.loads(dcnr(folder, "list", "--json").stdout)["checkpoints"]
    assert [(one["session"], one["step"]) for one in listed] == [("other", 3), ("run", 0), ("run", 5)]
    assert listed[0]["tensors"] == 6
    lines = dcnr(folder, "list", "run").stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["session", "step"], ["run", "0"], ["run", "5"]]
    assert dcnr(folder, "list", "nobody").stdout == "no checkpoints\n"


@pytest.mark.parametrize(("more", "step"), [((), 5), (("--step", "0"), 0)])
def test_export_writes_the_weights(folder: Path, more: tuple[str, ...], step: int) -> None:
    """Of the newest step, or of that one, 0 included."""
    out = folder / "w.safetensors"
    result = dcnr(folder, "export", "run", *more, "--out", str(out), "--json")
    assert json.loads(result.stdout) == {"out": str(out), "session": "run", "step": step, "tensors": 2}
    assert set(safetensors.numpy.load_file(out)) == {"embedder.weight", "lm_head.weight"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nobody",), "session 'nobody' has no checkpoint in"),
        (("run", "--step", "4"), "no checkpoint of step 4"),
        (("../run",), "'../run' is not a valid session name"),
    ],
)
def test_what_is_not_there_is_one_line_and_code_2(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    """And no file."""
    result = dcnr(folder, "export", *arguments, "--out", str(folder / "w.safetensors"))
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (folder / "w.safetensors").exists()


def test_a_damaged_part_is_code_1_and_no_file(folder: Path) -> None:
    """It is not the user's fault."""
    for part in (folder / "data/checkpoints/run/0000000005").glob("*.safetensors"):
        part.write_bytes(part.read_bytes()[:-1])
    result = dcnr(folder, "export", "run", "--out", str(folder / "w.safetensors"))
    assert result.exit_code == 1
    assert "is damaged" in result.stderr
    assert not (folder / "w.safetensors").exists()


@pytest.mark.parametrize("command", ["list", "export"])
def test_help_shows_an_example(folder: Path, command: str) -> None:
    """Of every command."""
    assert f"Example:\n    dcnr checkpoint {command}" in dcnr(folder, command, "--help").output
