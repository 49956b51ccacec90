"""`dcnr dataset`: make, list, look into, check and delete the datasets of a data directory. Nothing needs to run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np

from dcnr.cli.checkpoint import chosen, storage_options
from dcnr.cli.client import run
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
from dcnr.cli.texts import STDIN, reading_of, reading_options, with_stdin
from dcnr.data.batches import MAX_BATCH, MAX_SEED, MAX_STEP
from dcnr.data.create import DEFAULT_SEQ_LEN, Recipe, create_dataset
from dcnr.data.dataset import Dataset
from dcnr.data.derive import derive_dataset, import_ids
from dcnr.data.manifest import DatasetManifest, delete_dataset, list_datasets
from dcnr.data.split import OF_TOKENS, SPLITS, STRATEGIES, Split, SplitRule, Strategy
from dcnr.data.transfer import push_dataset
from dcnr.errors import UserError
from dcnr.text.documents import Format

F = TypeVar("F", bound=Callable[..., Any])

EXAMPLE_TOKENS = 40


@click.group(cls=Group)
def dataset() -> None:
    """Make and look at datasets."""


def split_options(choices: Sequence[Strategy], about: str) -> Callable[[F], F]:
    """Add what makes a `SplitRule` of one of these strategies."""
    options = (
        click.option("--split", "strategy", type=click.Choice(choices), default="tail", show_default=True, help=about),
        click.option("--validation", type=click.FloatRange(0, 1, max_open=True), default=0.1, show_default=True, help="Share kept for it."),
        click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, help="Of windows, and of folds of tokens."),
        click.option("--folds", type=click.IntRange(2), default=5, show_default=True, help="Of kfold."),
        click.option("--fold", type=click.IntRange(0), default=0, show_default=True, help="Which fold is for validation, from 0."),
    )

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


_OF_TEXT = (
    "What is for validation: the end of the text, whole documents by the hash of their text, whole files by the hash of their name, "
    "random windows, one of several folds of documents, or what --validation-from names (given)."
)
_OF_TOKENS = "What is for validation: the end of the tokens, random windows, or one of several folds of blocks."


@dataset.command(
    epilog=example(
        "dcnr dataset create books texts/ --tokenizer books",
        "dcnr dataset create web 'web/*.jsonl' --tokenizer web --field content --split documents --validation 0.01",
        "zcat wiki.txt.gz | dcnr dataset create wiki - --tokenizer wiki",
    )
)
@click.argument("name")
@click.argument("paths", nargs=-1, required=True)
@click.option("--tokenizer", required=True, help="The tokenizer to use.")
@split_options(STRATEGIES, _OF_TEXT)
@click.option("--validation-from", "given", multiple=True, metavar="PATH", help="Files, folders, globs that are for validation.")
@reading_options
@click.option("--seq-len", type=click.IntRange(1), default=DEFAULT_SEQ_LEN, show_default=True, help="Sequence length it is meant for.")
@data_dir_option
@json_option
def create(
    name: str,
    paths: tuple[str, ...],
    tokenizer: str,
    strategy: Strategy,
    validation: float,
    seed: int,
    folds: int,
    fold: int,
    given: tuple[str, ...],
    format: Format | None,
    field: str,
    separator: str | None,
    seq_len: int,
    data_dir: Path,
    as_json: bool,
) -> None:
    """Tokenise PATHS (files, folders, globs, - for stdin) into dataset NAME.

    A file is one document of text, unless --separator says otherwise; JSONL (.jsonl, .ndjson) and Parquet (.parquet) hold one in each
    line or row. Interrupted, the same command goes on where it was (stdin begins anew).
    """
    if given and strategy not in ("tail", "given"):
        raise UserError(f"--validation-from and --split {strategy} say two different things", "use one of them")
    if strategy == "given" and not given:
        raise UserError("--split given needs --validation-from", "name the files that are for validation")
    rule = SplitRule("given" if given else strategy, validation, seed, folds, fold)
    shown = tuple(path if path == STDIN else os.path.abspath(path) for path in (*paths, *given))
    with with_stdin(paths) as sources, progress("tokenising") as on_progress:
        recipe = Recipe(seq_len, rule, reading_of(format, field, separator), given, shown)
        made = create_dataset(data_dir, name, sources, tokenizer, recipe, on_progress)
    tell_skipped(made.skipped)
    show_record(_fields(made), as_json)


@dataset.command("import", epilog=example("dcnr dataset import owt --train train.bin --validation val.bin --tokenizer gpt2 --seq-len 1024"))
@click.argument("name")
@click.option("--train", multiple=True, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="In order.")
@click.option("--validation", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="In order.")
@click.option("--tokenizer", required=True, help="The tokenizer that made the ids.")
@click.option("--seq-len", type=click.IntRange(1), default=DEFAULT_SEQ_LEN, show_default=True, help="Sequence length it is meant for.")
@data_dir_option
@json_option
def import_(
    name: str, train: tuple[Path, ...], validation: tuple[Path, ...], tokenizer: str, seq_len: int, data_dir: Path, as_json: bool
) -> None:
    """Make dataset NAME of files of raw ids, as nanoGPT writes them (uint16; uint32 for a vocabulary above 65,536)."""
    show_record(_fields(import_ids(data_dir, name, {"train": train, "validation": validation}, tokenizer, seq_len)), as_json)


@dataset.command(epilog=example("dcnr dataset derive books-fold2 --from books --split kfold --folds 5 --fold 2"))
@click.argument("name")
@click.option("--from", "parent", required=True, help="The dataset whose tokens it is made of.")
@split_options(OF_TOKENS, _OF_TOKENS)
@click.option("--tokens", type=click.IntRange(1), help="Only so many, from the start.")
@click.option("--seq-len", type=click.IntRange(1), help="Sequence length it is meant for; that of the other, if not given.")
@data_dir_option
@json_option
def derive(
    name: str,
    parent: str,
    strategy: Strategy,
    validation: float,
    seed: int,
    folds: int,
    fold: int,
    tokens: int | None,
    seq_len: int | None,
    data_dir: Path,
    as_json: bool,
) -> None:
    """Make dataset NAME of the tokens of another one, split anew: by tail, windows or kfold. No text is needed."""
    rule = SplitRule(strategy, validation, seed, folds, fold)
    opened = Dataset.open(data_dir, parent, chosen(None, data_dir))
    show_record(_fields(derive_dataset(opened, name, rule, seq_len, tokens)), as_json)


@dataset.command("list", epilog=example("dcnr dataset list"))
@data_dir_option
@json_option
def list_(data_dir: Path, as_json: bool) -> None:
    """List all datasets."""
    rows = [_row(name, found) for name, found in list_datasets(data_dir).items()]
    columns = ("name", "tokenizer", "vocab_size", "train_tokens", "validation_tokens", "bytes", "problem")
    show_table("datasets", rows, columns, as_json)


def _row(name: str, found: DatasetManifest | UserError) -> dict[str, object]:
    return {"name": name, "problem": str(found)} if isinstance(found, UserError) else _fields(found) | {"problem": ""}


@dataset.command(epilog=example("dcnr dataset show books"))
@click.argument("name")
@data_dir_option
@json_option
def show(name: str, data_dir: Path, as_json: bool) -> None:
    """Show dataset NAME: what it holds, and how each split begins."""
    opened = Dataset.open(data_dir, name, chosen(None, data_dir))
    fields = _fields(opened.manifest)
    examples = {split: opened.text(split, 0, EXAMPLE_TOKENS) for split in SPLITS}
    if as_json:
        show_json(fields | {"examples": examples})
        return
    show_record(fields, as_json)
    for split, text in examples.items():
        click.echo(f"{split} begins  {text!r}" if text else f"{split} is empty")


@dataset.command(epilog=example("dcnr dataset batch books --split train --seed 1 --step 10 --batch 8 --out batch.npy"))
@click.argument("name")
@click.option("--split", type=click.Choice(SPLITS), default="train", show_default=True)
@click.option("--seed", type=click.IntRange(0, MAX_SEED), required=True, help="The session's seed.")
@click.option("--step", type=click.IntRange(1, MAX_STEP), required=True, help="The step, counted from 1.")
@click.option("--batch", type=click.IntRange(1, MAX_BATCH), required=True, help="Rows: the session's batch size.")
@click.option("--seq-len", type=click.IntRange(1), help="The network's sequence length, if it is not the dataset's own.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The .npy file to write.")
@data_dir_option
@json_option
def batch(name: str, split: Split, seed: int, step: int, batch: int, seq_len: int | None, out: Path, data_dir: Path, as_json: bool) -> None:
    """Write the token ids that one step of a session sees.

    They are int64 [batch, T + 1]: columns up to T are the inputs, from the second on the targets. A session takes T from its
    network's embedder; where that is not what the dataset was created with (see `dcnr dataset show`), say it with --seq-len.
    """
    opened = Dataset.open(data_dir, name, chosen(None, data_dir))
    ids = opened.batch(split, seed, step, batch, seq_len or opened.manifest.seq_len)
    with out.open("wb") as file:
        np.save(file, ids)
    show_record({"out": str(out), "shape": list(ids.shape)}, as_json)


@dataset.command(epilog=example("dcnr dataset verify books", "dcnr dataset verify books --storage s3://bucket/prefix"))
@click.argument("name")
@storage_options
@json_option
def verify(name: str, storage: str | None, data_dir: Path, as_json: bool) -> None:
    """Read all of dataset NAME and compare it with its hashes. What is only in the storage is fetched first."""
    opened = Dataset.open(data_dir, name, chosen(storage, data_dir))
    problems = interruptible(opened.problems)
    if problems:
        raise UserError("\n".join(problems), f"`dcnr dataset delete {name}`, and create or fetch it again")
    shards = opened.manifest.shards
    show_record({"name": name, "verified": len(shards), "tokens": sum(shard.tokens for shard in shards)}, as_json)


@dataset.command(epilog=example("dcnr dataset push books --storage s3://bucket/prefix"))
@click.argument("name")
@storage_options
@json_option
def push(name: str, storage: str | None, data_dir: Path, as_json: bool) -> None:
    """Put dataset NAME, with its tokenizer, into the storage, where orchestrators on other machines find it."""
    place = chosen(storage, data_dir)
    with progress("pushing") as on_progress:
        run(push_dataset(data_dir, name, place, on_progress))
    show_record({"name": name, "storage": place.url}, as_json)


@dataset.command(epilog=example("dcnr dataset delete books"))
@click.argument("name")
@data_dir_option
@json_option
def delete(name: str, data_dir: Path, as_json: bool) -> None:
    """Delete dataset NAME."""
    delete_dataset(data_dir, name)
    show_record({"deleted": name}, as_json)


def _fields(manifest: DatasetManifest) -> dict[str, object]:
    tokens = manifest.train_tokens + manifest.validation_tokens
    fields = asdict(manifest)
    del fields["splits"], fields["version"]
    for split in SPLITS:
        fields |= {f"{split}_tokens": manifest.tokens(split), f"{split}_bytes": manifest.bytes_of(split)}
    per_byte = tokens / manifest.bytes if manifest.bytes else None
    return fields | {"shards": len(manifest.shards), "tokens": tokens, "bytes": manifest.bytes, "tokens_per_byte": per_byte}
