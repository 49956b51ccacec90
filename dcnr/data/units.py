"""What one thread tokenises at a time: some stretches of files, whose ids become a part.

Rule 1: how the files are cut depends on them and on the recipe only.
Rule 2: a part is done when its `.json` is there, which comes last.
Rule 3: where a tokenizer has a token that ends documents, every document is followed by it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dcnr.data.manifest import Shard
from dcnr.data.split import SPLITS, Split, SplitRule
from dcnr.errors import UserError
from dcnr.text.documents import Piece, Reading, Stretch, read_stretch, stretches
from dcnr.text.tokenizer import Tokenizer

Unit = tuple[Stretch, ...]

UNIT_BYTES = 32 << 20
MAX_UNITS = 512
"""About: of more text, units are larger."""
_BATCH_CHARACTERS = 1 << 20
_BATCH_PIECES = 1 << 12


@dataclass(frozen=True, slots=True)
class Part:
    """The ids of one unit, by split, and how many documents ended in it."""

    shards: dict[Split, Shard]
    documents: int


@dataclass(frozen=True, slots=True)
class Encoder:
    """How text becomes ids of a split. `validation`: the files that are for it as a whole."""

    tokenizer: Tokenizer
    reading: Reading
    rule: SplitRule
    validation: frozenset[Path]
    stored: np.dtype[np.unsignedinteger]

    def split_of(self, file: Path, piece: Piece) -> Split:
        """Where a piece of a file belongs, as far as that is decided before all tokens are known."""
        if self.rule.of_documents:
            return self.rule.split_of(piece.digest)
        return "validation" if file in self.validation else "train"


def plan_units(files: Sequence[Path], reading: Reading, rule: SplitRule) -> list[Unit]:
    """All files, in order, as units of about `UNIT_BYTES`."""
    size = max(UNIT_BYTES, sum(file.stat().st_size for file in files) // MAX_UNITS)
    units: list[Unit] = []
    some: list[Stretch] = []
    held = 0
    for file in files:
        for stretch in stretches(file, reading, size, rule.of_documents):
            if some and held + stretch.bytes > size:
                units.append(tuple(some))
                some, held = [], 0
            some.append(stretch)
            held += stretch.bytes
    return [*units, tuple(some)] if some else units


def finished_unit(work: Path, number: int) -> Part | None:
    """What unit `number` gave, if it is done."""
    done = _done_file(work, number)
    if not done.exists():
        return None
    fields = json.loads(done.read_bytes())
    shards = {split: Shard(_ids_name(number, split), split, fields[split], "") for split in SPLITS}
    return Part(shards, fields["documents"])


def encode_unit(work: Path, number: int, unit: Unit, encoder: Encoder, advance: Callable[[int], None]) -> None:
    """Tokenise `unit` into its part; `advance` hears of the bytes that are done."""
    counts: dict[str, int] = dict.fromkeys((*SPLITS, "documents"), 0)
    with ExitStack() as stack:
        files = {split: stack.enter_context((work / _ids_name(number, split)).open("wb")) for split in SPLITS}
        for stretch in unit:
            for some in _batches(read_stretch(stretch, encoder.reading, encoder.rule.of_documents)):
                for split, ids in _encode(encoder, stretch.file, some):
                    files[split].write(np.ascontiguousarray(ids, encoder.stored).tobytes())
                    counts[split] += len(ids)
                counts["documents"] += sum(piece.ends for piece in some)
                advance(sum(len(piece.text.encode()) for piece in some))
    half = _done_file(work, number).with_suffix(".half")
    half.write_text(json.dumps(counts))
    half.rename(_done_file(work, number))


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    some: list[Piece] = []
    held = 0
    for piece in pieces:
        some.append(piece)
        held += len(piece.text)
        if held >= _BATCH_CHARACTERS or len(some) >= _BATCH_PIECES:
            yield some
            some, held = [], 0
    if some:
        yield some


def _encode(encoder: Encoder, file: Path, pieces: Sequence[Piece]) -> Iterator[tuple[Split, np.ndarray[tuple[int], np.dtype[np.uint32]]]]:
    try:
        encoded = encoder.tokenizer.encode_batch([piece.text for piece in pieces])
    except UserError as error:
        raise UserError(f"{file}: {error.message}", error.remedy) from error
    end = encoder.tokenizer.end_id
    found: dict[Split, list[np.ndarray[tuple[int], np.dtype[np.uint32]]]] = {split: [] for split in SPLITS}
    for piece, ids in zip(pieces, encoded, strict=True):
        here = found[encoder.split_of(file, piece)]
        here.append(ids)
        if end is not None and piece.ends:
            here.append(np.array([end], dtype=np.uint32))
    for split, some in found.items():
        if some:
            yield split, np.concatenate(some)


def _ids_name(number: int, split: Split) -> str:
    return f"{number:05d}-{split}.ids"


def _done_file(work: Path, number: int) -> Path:
    return work / f"{number:05d}.json"
