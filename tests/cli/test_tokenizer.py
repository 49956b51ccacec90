"""`dcnr tokenizer`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dcnr.cli.main import main

TEXT = "the cat sat on the mat\r\n\tand the 😀 hat\n" * 30


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of text."""
    (tmp_path / "text.txt").write_bytes(TEXT.encode())
    return tmp_path / "text.txt"


def dcnr(folder: Path, *arguments: str, stdin: str | bytes | None = None) -> Result:
    """Run `dcnr tokenizer …` on the data directory in `folder`."""
    return CliRunner().invoke(main, ["tokenizer", *arguments], input=stdin, env={"DCNR_DATA_DIR": str(folder / "data")})


def test_train_list_show_delete(tmp_path: Path, text: Path) -> None:
    """The life of a tokenizer."""
    trained = dcnr(tmp_path, "train", "b", str(text), "--vocab-size", "270", "--json")
    assert trained.exit_code == 0
    fields = json.loads(trained.stdout)
    assert (fields["name"], fields["kind"], fields["vocab_size"]) == ("b", "bpe", 270)
    assert Path(fields["file"]).is_file()
    assert dcnr(tmp_path, "train", "c", str(text), "--kind", "char").exit_code == 0
    listed = json.loads(dcnr(tmp_path, "list", "--json").stdout)["tokenizers"]
    assert [one["name"] for one in listed] == ["b", "c"]
    assert listed[0] == fields == json.loads(dcnr(tmp_path, "show", "b", "--json").stdout)
    assert "270" in dcnr(tmp_path, "show", "b").stdout
    assert dcnr(tmp_path, "delete", "b").exit_code == 0
    assert [one["name"] for one in json.loads(dcnr(tmp_path, "list", "--json").stdout)["tokenizers"]] == ["c"]


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_decode_gives_back_what_encode_took(tmp_path: Path, text: Path, kind: str) -> None:
    """Through arguments, pipes and JSON, byte for byte."""
    dcnr(tmp_path, "train", "t", str(text), "--kind", kind, "--vocab-size", "300")
    for encoded in (dcnr(tmp_path, "encode", "t", TEXT), dcnr(tmp_path, "encode", "t", stdin=TEXT.encode())):
        assert dcnr(tmp_path, "decode", "t", stdin=encoded.stdout).stdout_bytes == TEXT.encode()
        assert dcnr(tmp_path, "decode", "t", *encoded.stdout.split()).stdout_bytes == TEXT.encode()
    ids = json.loads(dcnr(tmp_path, "encode", "t", "the hat", "--json").stdout)["ids"]
    assert json.loads(dcnr(tmp_path, "decode", "t", *map(str, ids), "--json").stdout) == {"text": "the hat"}
    assert dcnr(tmp_path, "encode", "t", "").stdout == "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "n", "missing.txt"), "'missing.txt' does not exist"),
        (("train", "n", "{folder}/empty"), "the text is empty"),
        (("train", "n", "{folder}/bad"), "bad: invalid UTF-8 at byte 2"),
        (("train", "n/o", "{folder}/text.txt"), "'n/o' is not a valid tokenizer name"),
        (("train", "t", "{folder}/text.txt"), "'t' already"),
        (("train", "n", "{folder}/text.txt", "--vocab-size", "3"), "a vocabulary of 3 is not possible"),
        (("show", "x"), "no tokenizer 'x' (there are: t)"),
        (("delete", "x"), "no tokenizer 'x'"),
        (("encode", "t", "ß"), "does not know 'ß'"),
        (("decode", "t", "99"), "token id 99"),
    ],
)
def test_bad_input_is_one_line_and_code_2(tmp_path: Path, text: Path, arguments: tuple[str, ...], message: str) -> None:
    """And nothing is made."""
    (tmp_path / "empty").touch()
    (tmp_path / "bad").write_bytes(b"ab\xff")
    dcnr(tmp_path, "train", "t", str(text), "--kind", "char")
    result = dcnr(tmp_path, *(argument.format(folder=tmp_path) for argument in arguments))
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert [path.name for path in (tmp_path / "data" / "tokenizers").iterdir()] == ["t"]


def test_a_folder_is_read_without_what_is_no_text(tmp_path: Path, text: Path) -> None:
    """One line on stderr says how much was left out."""
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "latin.txt").write_bytes(b"\xe4")
    result = dcnr(tmp_path, "train", "t", str(tmp_path), "--kind", "char", "--json")
    assert result.exit_code == 0
    assert result.stderr == "skipped 2 files that are not UTF-8 text\n"
    assert json.loads(result.stdout)["vocab_size"] == len(set(TEXT))


@pytest.mark.parametrize(("command", "stdin", "message"), [("encode", b"a\xff", "byte 1"), ("decode", b"1 two", "'two'")])
def test_bad_stdin_is_named(tmp_path: Path, text: Path, command: str, stdin: bytes, message: str) -> None:
    """What is no text, or no numbers."""
    dcnr(tmp_path, "train", "t", str(text), "--kind", "char")
    result = dcnr(tmp_path, command, "t", stdin=stdin)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: stdin: ")
    assert message in result.stderr


def test_a_tokenizer_in_use_is_kept(tmp_path: Path, text: Path) -> None:
    """Its datasets could not be read without it."""
    dcnr(tmp_path, "train", "t", str(text), "--kind", "char")
    env = {"DCNR_DATA_DIR": str(tmp_path / "data")}
    assert CliRunner().invoke(main, ["dataset", "create", "d", str(text), "--tokenizer", "t"], env=env).exit_code == 0
    result = dcnr(tmp_path, "delete", "t")
    assert result.exit_code == 2
    assert "used by dataset d" in result.stderr
    assert dcnr(tmp_path, "show", "t").exit_code == 0


@pytest.mark.parametrize("command", ["train", "import", "list", "show", "encode", "decode", "export", "delete"])
def test_help_shows_an_example(tmp_path: Path, command: str) -> None:
    """Of every command."""
    assert f"Example:\n    dcnr tokenizer {command}" in dcnr(tmp_path, command, "--help").output


def test_export_and_import_keep_every_byte(tmp_path: Path, text: Path) -> None:
    """Special tokens too; what is exported is the file that is kept."""
    special = ("--special", "<|endoftext|>", "--special", "<|user|>")
    trained = json.loads(dcnr(tmp_path, "train", "b", str(text), "--vocab-size", "300", *special, "--json").stdout)
    size = trained["vocab_size"]
    assert trained["special"] == {"<|endoftext|>": size - 2, "<|user|>": size - 1}
    out = tmp_path / "deep" / "tokenizer.json"
    assert json.loads(dcnr(tmp_path, "export", "b", str(out), "--json").stdout) == {"name": "b", "out": str(out)}
    imported = json.loads(dcnr(tmp_path, "import", "i", str(out), "--json").stdout)
    assert {**imported, "name": "b", "file": trained["file"]} == trained
    refused = dcnr(tmp_path, "import", "t", str(text))
    assert refused.exit_code == 2
    assert "is not a tokenizer.json" in refused.stderr


def test_a_field_of_jsonl_from_stdin_is_learned(tmp_path: Path) -> None:
    """Nothing else of the lines is."""
    lines = json.dumps({"body": "abc", "other": "xyz"}) + "\n"
    arguments = ("train", "c", "-", "--kind", "char", "--format", "jsonl", "--field", "body", "--json")
    assert json.loads(dcnr(tmp_path, *arguments, stdin=lines).stdout)["vocab_size"] == 3
