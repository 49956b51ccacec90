"""How a dataset is made of text: cut into units, which are tokenised in parallel, whose tokens then become shards.

`datasets/.<name>.unfinished/` holds, for every unit that is done, its ids (one file for each split) and what they are (`.json`).

Rule 1: a dataset is complete or does not exist: its folder is renamed into its place at the end, the manifest being in it.
Rule 2: who makes the same again, of the same files, goes on behind the units that are done. What cannot be (bad input) leaves nothing.
Rule 3: what comes out depends on files and recipe only, not on how many threads there were or where it was interrupted.
Rule 4: memory does not grow with the text: a thread holds some pieces of it, whatever the size of a unit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock

from dcnr.data.making import FINAL, finish, making
from dcnr.data.manifest import VERSION, DatasetManifest, Dtype, Ids, Shard, check_free, dtype_for, stored, unfinished_folder
from dcnr.data.shards import TokenStream, blocks, map_ids, write_shards
from dcnr.data.split import SPLITS, Split, SplitRule, check_length
from dcnr.data.units import Encoder, Part, Unit, encode_unit, finished_unit, plan_units
from dcnr.errors import UserError
from dcnr.text.documents import Reading, digest_of
from dcnr.text.preprocess import FoundFiles, distinct, find_files, total_bytes
from dcnr.text.tokenizer import OnProgress, fingerprint, no_progress, open_tokenizer

MAX_THREADS = 8
"""The library uses all cores for each of them anyway."""
DEFAULT_SEQ_LEN = 128


@dataclass(frozen=True, slots=True)
class Recipe:
    """What decides a dataset besides its text and tokenizer. `given` are the sources that are for validation. `shown`: how the manifest
    names the sources, where that is not by their paths."""

    seq_len: int = DEFAULT_SEQ_LEN
    rule: SplitRule = field(default_factory=SplitRule)
    reading: Reading = field(default_factory=Reading)
    given: tuple[str, ...] = ()
    shown: tuple[str, ...] | None = None

    def check(self) -> None:
        """Raise `UserError` for what cannot be."""
        if self.seq_len < 1:
            raise UserError(f"a sequence length of {self.seq_len} is not possible", "use 1 or more")
        if self.reading.separator == "":
            raise UserError("the separator is empty", "give the text that stands between two documents")
        if bool(self.given) != (self.rule.strategy == "given"):
            which = "names no sources" if not self.given else f"names sources, and is by {self.rule.strategy}"
            raise UserError(f"what is for validation {which}", "name sources for a split by 'given', and for no other")
        self.rule.check()


def create_dataset(
    data_dir: Path, name: str, sources: Sequence[str | Path], tokenizer_name: str, recipe: Recipe, on_progress: OnProgress = no_progress
) -> DatasetManifest:
    """Tokenise `sources` (files, folders, globs) and keep the ids as dataset `name`.

    Raises `UserError` for what is missing, empty, not UTF-8, unknown to the tokenizer or shorter than one window.
    """
    recipe.check()
    folder = check_free(data_dir, name)
    tokenizer = open_tokenizer(data_dir, tokenizer_name)
    found = find_files(sources)
    given = find_files(recipe.given) if recipe.given else FoundFiles((), 0)
    files = distinct((*found.files, *given.files))
    validation = _for_validation(files, given.files, recipe.rule)
    sha256, dtype = fingerprint(data_dir, tokenizer_name), dtype_for(tokenizer.vocab_size)
    with making(unfinished_folder(data_dir, name)) as work:
        _begin(work, _plan(files, validation, sha256, recipe))
        encoder = Encoder(tokenizer, recipe.reading, recipe.rule, validation, stored(dtype))
        parts = _encode_all(work, plan_units(files, recipe.reading, recipe.rule), encoder, total_bytes(files), on_progress)
        shards, splits = write_shards(work / FINAL, _blocks(work, parts, recipe, dtype), stored(dtype), tokenizer.token_bytes())
        check_length(name, "train", splits["train"].tokens, recipe.seq_len)
        manifest = DatasetManifest(
            name=name,
            tokenizer=tokenizer_name,
            tokenizer_sha256=sha256,
            vocab_size=tokenizer.vocab_size,
            dtype=dtype,
            seq_len=recipe.seq_len,
            strategy=str(recipe.rule),
            splits=splits,
            documents=sum(part.documents for part in parts),
            shards=shards,
            sources=recipe.shown if recipe.shown is not None else tuple(map(os.path.abspath, (*sources, *recipe.given))),
            files=len(files),
            skipped=found.skipped + given.skipped,
        )
        finish(work, folder, manifest)
    return manifest


def _for_validation(files: Sequence[Path], given: Sequence[Path], rule: SplitRule) -> frozenset[Path]:
    """Those of `files` that are for validation as a whole: by their name, or because they were named, under whatever path."""
    if rule.strategy == "files":
        return frozenset(file for file in files if rule.split_of(digest_of(_name(file))) == "validation")
    named = {file.resolve() for file in given}
    return frozenset(file for file in files if file.resolve() in named)


def _name(file: Path) -> bytes:
    """That of a file and of its folder, however it was named."""
    return os.fsencode(f"{file.parent.resolve().name}/{file.name}")


def _plan(files: Sequence[Path], validation: frozenset[Path], tokenizer: str, recipe: Recipe) -> str:
    """What must be the same for the units that are done to be of use."""
    looked = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return json.dumps([VERSION, looked, sorted(map(str, validation)), tokenizer, asdict(recipe)], indent=1)


def _begin(work: Path, plan: str) -> None:
    """Go on in `work` if it was begun with the same plan, else begin anew."""
    file = work / "plan.json"
    if file.exists() and file.read_text(encoding="utf-8") == plan:
        return
    file.unlink(missing_ok=True)  # first: it vouches for the others
    for old in (*work.glob("*.ids"), *work.glob("*.json")):
        old.unlink()
    file.write_text(plan, encoding="utf-8")


class _Progress:
    """Counts what all threads do; when one fails, the others fail at their next step."""

    def __init__(self, total: int, on_progress: OnProgress) -> None:
        self._total, self._on_progress = total, on_progress
        self._done, self._stopped, self._lock = 0, False, Lock()

    def advance(self, size: int) -> None:
        """So many bytes more."""
        with self._lock:
            if self._stopped:
                raise InterruptedError("another unit failed")
            self._done += size
            self._on_progress(min(self._done, self._total), self._total)

    def stop(self) -> None:
        """No further step."""
        with self._lock:
            self._stopped = True


def _encode_all(work: Path, units: Sequence[Unit], encoder: Encoder, total: int, on_progress: OnProgress) -> list[Part]:
    """The parts of all units, in order; those that are done already are not made again."""
    progress = _Progress(total, on_progress)
    todo = []
    for number, unit in enumerate(units):
        if finished_unit(work, number) is None:
            todo.append((number, unit))
        else:
            progress.advance(sum(stretch.bytes for stretch in unit))
    with ThreadPoolExecutor(max(1, min(len(todo), MAX_THREADS, os.cpu_count() or 1)), "tokenise") as pool:
        running = [pool.submit(encode_unit, work, number, unit, encoder, progress.advance) for number, unit in todo]
        try:
            for one in as_completed(running):
                one.result()
        except BaseException:
            progress.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    on_progress(total, total)
    return [part for number in range(len(units)) if (part := finished_unit(work, number)) is not None]


def _blocks(work: Path, parts: Sequence[Part], recipe: Recipe, dtype: Dtype) -> Iterator[tuple[Split, Ids]]:
    """All ids, each with the split that it belongs to."""
    streams = {split: _stream(work, [part.shards[split] for part in parts], dtype) for split in SPLITS}
    if recipe.rule.of_tokens:
        yield from blocks(streams["train"], recipe.rule.spans(len(streams["train"]), recipe.seq_len))
    else:
        for split, stream in streams.items():
            yield from blocks(stream, [(0, len(stream), split)])


def _stream(work: Path, shards: Sequence[Shard], dtype: Dtype) -> TokenStream:
    return TokenStream([shard for shard in shards if shard.tokens], lambda shard: map_ids(work / shard.file, stored(dtype)))
