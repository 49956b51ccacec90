"""`dcnr dataset`: make, list, look into and delete the datasets of a data directory. Nothing needs to run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
import numpy as np

from dcnr.cli.output import Group, data_dir_option, example, json_option, progress, show_record, show_table, tell_skipped
from dcnr.data.batches import MAX_BATCH, MAX_SEED, MAX_STEP
from dcnr.data.dataset import DEFAULT_SEQ_LEN, Dataset, DatasetManifest, delete_dataset, list_datasets, read_manifest
from dcnr.data.split import SPLITS, Split


@click.group(cls=Group)
def dataset() -> None:
    """Make and look at datasets."""


@dataset.command(epilog=example("dcnr dataset create books texts/ --tokenizer books", "dcnr dataset create d 'src/**/*.py' --tokenizer t"))
@click.argument("name")
@click.argument("paths", nargs=-1, required=True)
@click.option("--tokenizer", required=True, help="The tokenizer to use.")
@click.option("--validation", type=click.FloatRange(0, 1, max_open=True), default=0.1, show_default=True, help="Share kept for validation.")
@click.option("--seq-len", type=click.IntRange(1), default=DEFAULT_SEQ_LEN, show_default=True, help="Sequence length it is meant for.")
@data_dir_option
@json_option
def create(name: str, paths: tuple[str, ...], tokenizer: str, validation: float, seq_len: int, data_dir: Path, as_json: bool) -> None:
    """Tokenise PATHS (text files, folders, globs) into dataset NAME; the end of the text is for validation."""
    with progress("tokenising") as on_progress:
        made = Dataset.create(data_dir, name, paths, tokenizer, validation, seq_len, on_progress)
    tell_skipped(made.manifest.skipped)
    show_record(_fields(made.manifest), as_json)


@dataset.command("list", epilog=example("dcnr dataset list"))
@data_dir_option
@json_option
def list_(data_dir: Path, as_json: bool) -> None:
    """List all datasets."""
    rows = [_fields(manifest) for manifest in list_datasets(data_dir)]
    show_table("datasets", rows, ("name", "tokenizer", "vocab_size", "train_tokens", "validation_tokens", "bytes"), as_json)


@dataset.command(epilog=example("dcnr dataset show books"))
@click.argument("name")
@data_dir_option
@json_option
def show(name: str, data_dir: Path, as_json: bool) -> None:
    """Show dataset NAME."""
    show_record(_fields(read_manifest(data_dir, name)), as_json)


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
    opened = Dataset.open(data_dir, name)
    ids = opened.batch(split, seed, step, batch, seq_len or opened.manifest.seq_len)
    with out.open("wb") as file:
        np.save(file, ids)
    show_record({"out": str(out), "shape": list(ids.shape)}, as_json)


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
    return asdict(manifest) | {"tokens": tokens, "tokens_per_byte": tokens / manifest.bytes}
