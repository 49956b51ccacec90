"""What is tokenised at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dcnr.data import units
from dcnr.data.split import SplitRule
from dcnr.data.units import Encoder, encode_unit, finished_unit, plan_units
from dcnr.errors import UserError
from dcnr.text.documents import Reading, read_stretch
from dcnr.text.tokenizer import Tokenizer
from tests.data.texts import make_tokenizer, text_of


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """One large and two small ones, and an empty one."""
    sizes = {"large": 3000, "empty": 0, "small": 10, "tiny": 1}
    for name, words in sizes.items():
        (tmp_path / name).write_bytes(text_of(words).encode() if words else b"")
    return [tmp_path / name for name in sizes]


@pytest.mark.parametrize("size", [100, 1000, 10**9])
def test_units_are_the_files_in_order(files: list[Path], size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut where they are large, together where they are small; nothing lost, nothing twice."""
    monkeypatch.setattr(units, "UNIT_BYTES", size)
    planned = plan_units(files, Reading(), SplitRule())
    text = "".join(piece.text for unit in planned for stretch in unit for piece in read_stretch(stretch, Reading()))
    assert text == "".join(file.read_bytes().decode() for file in files)
    assert (len(planned) == 1) == (size == 10**9)
    assert planned == plan_units(files, Reading(), SplitRule())


def test_a_document_that_is_to_stay_whole_is_not_cut(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hash says where all of it goes."""
    monkeypatch.setattr(units, "UNIT_BYTES", 100)
    planned = plan_units(files, Reading(), SplitRule("documents"))
    stretches = [stretch for unit in planned for stretch in unit]
    assert [(stretch.file, stretch.start, stretch.stop) for stretch in stretches] == [(file, 0, file.stat().st_size) for file in files]


def encoder_of(tokenizer: Tokenizer) -> Encoder:
    """Everything is for training."""
    return Encoder(tokenizer, Reading(), SplitRule(), frozenset(), np.dtype("<u2"))


def test_a_unit_is_done_when_its_part_is_there(files: list[Path], tmp_path: Path) -> None:
    """Before that there is none, whatever files lie about."""
    tokenizer = make_tokenizer(tmp_path / "data")
    (unit,) = plan_units(files, Reading(), SplitRule())
    (tmp_path / "00007-train.ids").write_bytes(b"half")
    assert finished_unit(tmp_path, 7) is None
    told: list[int] = []
    encode_unit(tmp_path, 7, unit, encoder_of(tokenizer), told.append)
    part = finished_unit(tmp_path, 7)
    assert part is not None
    assert part.documents == 3
    ids = np.fromfile(tmp_path / part.shards["train"].file, "<u2")
    assert len(ids) == part.shards["train"].tokens
    assert tokenizer.end_id is not None
    assert tokenizer.decode([int(token) for token in ids if token != tokenizer.end_id]) == "".join(
        file.read_bytes().decode() for file in files
    )
    assert sum(told) == sum(file.stat().st_size for file in files)


def test_what_the_tokenizer_does_not_know_is_named_with_its_file(tmp_path: Path) -> None:
    """And the unit is not done."""
    (tmp_path / "learn").write_text("abc")
    (tmp_path / "odd").write_text("abß")
    tokenizer = Tokenizer.train([tmp_path / "learn"], "char")
    (unit,) = plan_units([tmp_path / "odd"], Reading(), SplitRule())
    with pytest.raises(UserError, match="odd: the tokenizer does not know 'ß'"):
        encode_unit(tmp_path, 0, unit, encoder_of(tokenizer), lambda _: None)
    assert finished_unit(tmp_path, 0) is None
