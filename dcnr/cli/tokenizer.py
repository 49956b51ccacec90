"""`dcnr tokenizer`: train, import, list, show, use, export and delete the tokenizers of a data directory. Nothing needs to run."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import click

from dcnr.cli.output import (
    Group,
    data_dir_option,
    example,
    interruptible,
    json_option,
    progress,
    show_json,
    show_record,
    show_table,
    tell_skipped,
)
from dcnr.cli.texts import reading_of, reading_options, with_stdin
from dcnr.data.manifest import DatasetManifest, list_datasets
from dcnr.errors import UserError
from dcnr.storage.file import write_file
from dcnr.text.documents import Format
from dcnr.text.preprocess import find_files
from dcnr.text.tokenizer import (
    DEFAULT_VOCABULARY,
    Kind,
    Tokenizer,
    add_tokenizer,
    check_free,
    delete_tokenizer,
    fingerprint,
    import_tokenizer,
    list_tokenizers,
    open_tokenizer,
    tokenizer_path,
)


@click.group(cls=Group)
def tokenizer() -> None:
    """Train and use tokenizers."""


@tokenizer.command(epilog=example("dcnr tokenizer train books texts/ --vocab-size 8192", "dcnr tokenizer train abc book.txt --kind char"))
@click.argument("name")
@click.argument("paths", nargs=-1, required=True)
@click.option("--kind", type=click.Choice(["bpe", "char"]), default="bpe", show_default=True, help="Byte-level BPE, or characters.")
@click.option("--vocab-size", type=int, default=DEFAULT_VOCABULARY, show_default=True, help="At most this many tokens.")
@click.option("--special", multiple=True, metavar="TOKEN", help="A token that stands for no text; <|endoftext|> ends documents.")
@reading_options
@data_dir_option
@json_option
def train(
    name: str,
    paths: tuple[str, ...],
    kind: Kind,
    vocab_size: int,
    special: tuple[str, ...],
    format: Format | None,
    field: str,
    separator: str | None,
    data_dir: Path,
    as_json: bool,
) -> None:
    """Learn tokenizer NAME from PATHS: files, folders, globs, - for stdin; text, JSONL (.jsonl, .ndjson) or Parquet (.parquet)."""
    check_free(data_dir, name)
    reading = reading_of(format, field, separator)
    with with_stdin(paths) as sources, progress("training (after reading, at 100%, it merges)") as on_progress:
        found = find_files(sources)
        tell_skipped(found.skipped)
        trained = interruptible(partial(Tokenizer.train, found.files, kind, vocab_size, on_progress, special, reading))
    add_tokenizer(data_dir, name, trained)
    show_record(_fields(data_dir, name), as_json)


@tokenizer.command("import", epilog=example("dcnr tokenizer import gpt2 downloads/gpt2/tokenizer.json"))
@click.argument("name")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@data_dir_option
@json_option
def import_(name: str, file: Path, data_dir: Path, as_json: bool) -> None:
    """Keep the tokenizer.json FILE of another tool as tokenizer NAME, if it gives every text back as it was."""
    import_tokenizer(data_dir, name, file)
    show_record(_fields(data_dir, name), as_json)


@tokenizer.command(epilog=example("dcnr tokenizer export books books/tokenizer.json"))
@click.argument("name")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@data_dir_option
@json_option
def export(name: str, out: Path, data_dir: Path, as_json: bool) -> None:
    """Write tokenizer NAME to the file OUT, which the `tokenizers` library and others read."""
    open_tokenizer(data_dir, name)
    write_file(out, tokenizer_path(data_dir, name).read_bytes())
    show_record({"name": name, "out": str(out)}, as_json)


@tokenizer.command("list", epilog=example("dcnr tokenizer list"))
@data_dir_option
@json_option
def list_(data_dir: Path, as_json: bool) -> None:
    """List all tokenizers."""
    rows = [_fields(data_dir, name) for name in list_tokenizers(data_dir)]
    show_table("tokenizers", rows, ("name", "kind", "vocab_size"), as_json)


@tokenizer.command(epilog=example("dcnr tokenizer show books"))
@click.argument("name")
@data_dir_option
@json_option
def show(name: str, data_dir: Path, as_json: bool) -> None:
    """Show tokenizer NAME."""
    show_record(_fields(data_dir, name), as_json)


@tokenizer.command(epilog=example("dcnr tokenizer encode books 'Once upon a time'", "dcnr tokenizer encode books < book.txt"))
@click.argument("name")
@click.argument("text", required=False)
@data_dir_option
@json_option
def encode(name: str, text: str | None, data_dir: Path, as_json: bool) -> None:
    """Print the token ids of TEXT (of stdin, if not given)."""
    ids = open_tokenizer(data_dir, name).encode(_stdin() if text is None else text)
    if as_json:
        show_json({"ids": ids})
    else:
        click.echo(" ".join(map(str, ids)))


@tokenizer.command(epilog=example("dcnr tokenizer decode books 74 240", "dcnr tokenizer encode books hi | dcnr tokenizer decode books"))
@click.argument("name")
@click.argument("ids", nargs=-1, type=int)
@data_dir_option
@json_option
def decode(name: str, ids: tuple[int, ...], data_dir: Path, as_json: bool) -> None:
    """Print the text of IDS (those on stdin, if none are given), exactly: no newline is added."""
    text = open_tokenizer(data_dir, name).decode(ids or _ids(_stdin()))
    if as_json:
        show_json({"text": text})
    else:
        click.echo(text.encode(), nl=False)


@tokenizer.command(epilog=example("dcnr tokenizer delete books"))
@click.argument("name")
@data_dir_option
@json_option
def delete(name: str, data_dir: Path, as_json: bool) -> None:
    """Delete tokenizer NAME, unless a dataset was made with it."""
    found = list_datasets(data_dir).values()
    used = [dataset.name for dataset in found if isinstance(dataset, DatasetManifest) and dataset.tokenizer == name]
    if used:
        raise UserError(f"tokenizer '{name}' is used by dataset {', '.join(used)}", "delete that first")
    delete_tokenizer(data_dir, name)
    show_record({"deleted": name}, as_json)


def _fields(data_dir: Path, name: str) -> dict[str, object]:
    opened = open_tokenizer(data_dir, name)
    return {
        "name": name,
        "kind": opened.kind,
        "vocab_size": opened.vocab_size,
        "special": opened.special,
        "file": str(tokenizer_path(data_dir, name)),
        "sha256": fingerprint(data_dir, name),
    }


def _stdin() -> str:
    data = sys.stdin.buffer.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"stdin: invalid UTF-8 at byte {error.start}", "give UTF-8 text") from error


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError as error:
        raise UserError(f"stdin: {error}", "give token ids, separated by blanks") from error
