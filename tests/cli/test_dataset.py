"""`dcnr dataset`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dcnr.cli.main import main
from dcnr.data.dataset import Dataset
from dcnr.text.tokenizer import Tokenizer, add_tokenizer

TEXT = "the cat sat on the mat and the hat\n" * 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`text.txt`, and a data directory `data` with a char tokenizer `c`."""
    (tmp_path / "text.txt").write_text(TEXT)
    add_tokenizer(tmp_path / "data", "c", Tokenizer.train([tmp_path / "text.txt"], "char"))
    return tmp_path


def dcnr(folder: Path, *arguments: str) -> Result:
    """Run `dcnr dataset …` on the data directory in `folder`."""
    return CliRunner().invoke(main, ["dataset", *arguments], env={"DCNR_DATA_DIR": str(folder / "data")})


def create(folder: Path, *more: str) -> Result:
    """Dataset `d` of the text."""
    return dcnr(folder, "create", "d", str(folder / "text.txt"), "--tokenizer", "c", *more)


def test_create_list_show_delete(folder: Path) -> None:
    """The life of a dataset."""
    made = create(folder, "--validation", "0.2", "--seq-len", "16", "--json")
    assert made.exit_code == 0
    fields = json.loads(made.stdout)
    assert (fields["tokens"], fields["train_tokens"], fields["seq_len"]) == (len(TEXT), len(TEXT) * 8 // 10, 16)
    assert fields["tokens_per_byte"] == 1.0
    assert json.loads(dcnr(folder, "list", "--json").stdout) == {"datasets": [fields | {"problem": ""}]}
    assert (fields["train_bytes"], fields["validation_bytes"], fields["documents"]) == (len(TEXT) * 8 // 10, len(TEXT) // 5, 1)
    examples = {"train": TEXT[:40], "validation": TEXT[len(TEXT) * 8 // 10 :][:40]}
    assert json.loads(dcnr(folder, "show", "d", "--json").stdout) == fields | {"examples": examples}
    assert f"train begins  {TEXT[:40]!r}" in dcnr(folder, "show", "d").stdout
    assert "uint16" in dcnr(folder, "show", "d").stdout
    assert dcnr(folder, "delete", "d").exit_code == 0
    assert dcnr(folder, "list").stdout == "no datasets\n"


def test_a_dataset_that_cannot_be_read_is_listed_with_the_others(folder: Path) -> None:
    """With what to do; it keeps nobody from deleting a tokenizer that no other one needs."""
    create(folder)
    (folder / "data/datasets/old").mkdir()
    (folder / "data/datasets/old/manifest.json").write_text('{"version": 1}')
    made, old = json.loads(dcnr(folder, "list", "--json").stdout)["datasets"]
    assert (made["name"], made["problem"], old["name"]) == ("d", "", "old")
    assert "has format 1, this program reads 2" in old["problem"]
    assert "`dcnr dataset delete old`" in dcnr(folder, "list").stdout.replace("\n", " ")
    delete = ("tokenizer", "delete", "c")
    env = {"DCNR_DATA_DIR": str(folder / "data")}
    assert "is used by dataset d " in CliRunner().invoke(main, delete, env=env).stderr
    dcnr(folder, "delete", "d")
    assert CliRunner().invoke(main, delete, env=env).exit_code == 0


def test_without_a_data_directory_there_is_no_dataset(tmp_path: Path) -> None:
    """Which is said, and not that a disk is gone."""
    result = dcnr(tmp_path, "show", "x")
    assert (result.exit_code, "no dataset 'x'" in result.stderr) == (2, True)


def test_batch_writes_what_a_step_sees(folder: Path) -> None:
    """int64 [B, T + 1]; T is the dataset's unless another is given."""
    create(folder, "--seq-len", "16")
    opened = Dataset.open(folder / "data", "d")
    out = folder / "f.npy"
    arguments = ("batch", "d", "--split", "train", "--seed", "5", "--step", "3", "--batch", "4", "--out", str(out))
    for seq_len, more in ((16, ()), (7, ("--seq-len", "7"))):
        assert json.loads(dcnr(folder, *arguments, *more, "--json").stdout) == {"out": str(out), "shape": [4, seq_len + 1]}
        ids = np.load(out)
        assert ids.dtype == np.int64
        assert (ids == opened.batch("train", 5, 3, 4, seq_len)).all()


def test_out_is_written_under_the_very_name(folder: Path) -> None:
    """Whatever its suffix."""
    create(folder, "--seq-len", "16")
    assert dcnr(folder, "batch", "d", "--seed", "1", "--step", "1", "--batch", "1", "--out", str(folder / "ids")).exit_code == 0
    assert np.load(folder / "ids").shape == (1, 17)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("create", "d", "missing.txt", "--tokenizer", "c"), "'missing.txt' does not exist"),
        (("create", "d", "{folder}/text.txt", "--tokenizer", "x"), "no tokenizer 'x'"),
        (("create", "d", "{folder}/empty", "--tokenizer", "c"), "train split has 0 tokens"),
        (("create", "d", "{folder}/text.txt", "--tokenizer", "c", "--seq-len", "5000"), "sequence length 5000 needs 5001"),
        (("create", "kept", "{folder}/text.txt", "--tokenizer", "c"), "'kept' already"),
        (("show", "x"), "no dataset 'x'"),
        (("verify", "x"), "no dataset 'x'"),
        (("push", "x"), "no dataset 'x'"),
        (("derive", "y", "--from", "x"), "no dataset 'x'"),
        (("derive", "y", "--from", "kept", "--split", "files"), "'files' is not one of 'tail', 'windows', 'kfold'"),
        (("push", "kept"), "is the data directory itself"),
        (("create", "d", "{folder}/text.txt", "--tokenizer", "c", "--split", "given"), "needs --validation-from"),
        (
            ("create", "d", "{folder}/text.txt", "--tokenizer", "c", "--split", "files", "--validation-from", "x"),
            "say two different things",
        ),
        (("delete", "x"), "no dataset 'x'"),
        (("batch", "x", "--seed", "1", "--step", "1", "--batch", "1", "--out", "f.npy"), "no dataset 'x'"),
        (("batch", "kept", "--seed", "1", "--step", "1", "--batch", "1", "--out", "{folder}/no/f.npy"), "f.npy: No such file"),
    ],
)
def test_bad_input_is_one_line_and_code_2(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    """And nothing is made or lost."""
    (folder / "empty").touch()
    dcnr(folder, "create", "kept", str(folder / "text.txt"), "--tokenizer", "c")
    result = dcnr(folder, *(argument.format(folder=folder) for argument in arguments))
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert [path.name for path in (folder / "data" / "datasets").iterdir()] == ["kept"]


@pytest.mark.parametrize(("option", "value"), [("--step", 10**23), ("--step", 0), ("--batch", 65537), ("--seed", 2**63), ("--seed", -1)])
def test_a_batch_that_no_session_can_have_is_refused(folder: Path, option: str, value: int) -> None:
    """With the range; nothing is written."""
    create(folder, "--seq-len", "16")
    asked = {"--seed": 1, "--step": 1, "--batch": 1} | {option: value}
    result = dcnr(folder, "batch", "d", *(str(word) for pair in asked.items() for word in pair), "--out", str(folder / "f.npy"))
    assert result.exit_code == 2
    assert f"{value} is not in the range" in result.stderr
    assert not (folder / "f.npy").exists()


@pytest.mark.parametrize("more", [("--validation", "1"), ("--validation", "-0.1"), ("--seq-len", "0")])
def test_impossible_options_are_refused(folder: Path, more: tuple[str, str]) -> None:
    """Before anything is read."""
    assert create(folder, *more).exit_code == 2


def test_stdin_and_jsonl_become_documents(folder: Path) -> None:
    """The manifest says that it was stdin; an end of documents is shown as what it is."""
    dcnr_tokenizer = ["tokenizer", "train", "e", str(folder / "text.txt"), "--special", "<|endoftext|>", "--vocab-size", "300"]
    assert CliRunner().invoke(main, dcnr_tokenizer, env={"DCNR_DATA_DIR": str(folder / "data")}).exit_code == 0
    lines = '{"body": "the cat"}\n{"body": "the hat sat on the mat"}\n'
    arguments = ["dataset", "create", "j", "-", "--tokenizer", "e", "--format", "jsonl", "--field", "body", "--validation", "0"]
    made = CliRunner().invoke(main, [*arguments, "--seq-len", "2", "--json"], input=lines, env={"DCNR_DATA_DIR": str(folder / "data")})
    assert made.exit_code == 0, made.output
    fields = json.loads(made.stdout)
    assert (fields["sources"], fields["documents"], fields["bytes"]) == (["-"], 2, len("the catthe hat sat on the mat"))
    shown = json.loads(dcnr(folder, "show", "j", "--json").stdout)["examples"]
    assert shown == {"train": "the cat<|endoftext|>the hat sat on the mat<|endoftext|>", "validation": ""}


def test_derive_import_verify_and_push(folder: Path) -> None:
    """A dataset of another's tokens, of raw ids; checked, and put into a storage, from which another machine reads it."""
    create(folder, "--seq-len", "16")
    derived = dcnr(folder, "derive", "w", "--from", "d", "--split", "windows", "--validation", "0.5", "--seq-len", "4", "--json")
    assert json.loads(derived.stdout)["parent"] == "d"
    raw = folder / "data" / "datasets" / "d" / "train-00000.bin"
    imported = dcnr(folder, "import", "i", "--train", str(raw), "--tokenizer", "c", "--seq-len", "16", "--json")
    assert json.loads(imported.stdout)["train_tokens"] == json.loads(dcnr(folder, "show", "d", "--json").stdout)["train_tokens"]
    assert json.loads(dcnr(folder, "verify", "w", "--json").stdout)["tokens"] == len(TEXT)
    storage = f"file://{folder}/storage"
    assert dcnr(folder, "push", "w", "--storage", storage).exit_code == 0
    elsewhere = CliRunner().invoke(
        main, ["dataset", "verify", "w", "--json"], env={"DCNR_DATA_DIR": str(folder / "other"), "DCNR_STORAGE": storage}
    )
    assert json.loads(elsewhere.stdout)["tokens"] == len(TEXT)
    (folder / "other/datasets/w/train-00000.bin").unlink()
    env = {"DCNR_DATA_DIR": str(folder / "other"), "DCNR_STORAGE": storage}
    half = CliRunner().invoke(main, ["dataset", "derive", "h", "--from", "w", "--json"], env=env)
    assert json.loads(half.stdout)["tokens"] == len(TEXT)
    shard = folder / "data" / "datasets" / "w" / "train-00000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    damaged = dcnr(folder, "verify", "w")
    assert damaged.exit_code == 2
    assert "train-00000.bin is damaged: its sha256 is" in damaged.stderr


@pytest.mark.parametrize("command", ["create", "import", "derive", "list", "show", "batch", "verify", "push", "delete"])
def test_help_shows_an_example(folder: Path, command: str) -> None:
    """Of every command."""
    assert f"Example:\n    dcnr dataset {command}" in dcnr(folder, command, "--help").output
