"""Declared outputs over windows of a dataset."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dcnr.cli.shown import IDS, Windows, outputs_of
from dcnr.data.dataset import NO_TARGET, Dataset
from dcnr.errors import NotFound, UserError
from dcnr.ids import SessionId
from dcnr.storage.file import FileStorage
from tests.orchestrator.running import make_data
from tests.storage.exports import SMALL, save_network

DECLARED = SMALL + "outputs: [{name: logits, node_id: head}, {name: hidden, node_id: act}]\n"
RUN = SessionId("run")


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory with dataset `text` and a checkpoint of `run`."""
    make_data(tmp_path)
    asyncio.run(save_network(FileStorage(tmp_path), RUN, DECLARED, dataset="text"))
    return tmp_path


def outputs(data_dir: Path, windows: Windows, *names: str, session: str = "run", step: int | None = None) -> dict[str, npt.NDArray[Any]]:
    """On the backend that is plain NumPy."""
    return asyncio.run(outputs_of((FileStorage(data_dir), data_dir), (SessionId(session), step), names, windows, "numpy"))


def test_every_window_of_the_split_gives_a_row(data_dir: Path) -> None:
    """In order, with its ids; and a later one gives what it gives among all."""
    dataset = Dataset.open(data_dir, "text")
    there = dataset.windows("validation", 6)
    whole = outputs(data_dir, Windows("validation", 0, there))
    assert {name: array.shape for name, array in whole.items()} == {IDS: (there, 6), "logits": (there, 6, 8), "hidden": (there, 6, 4)}
    assert np.array_equal(whole[IDS], dataset.window_rows("validation", 0, there, 6)[:, :-1])
    assert np.count_nonzero(whole[IDS] == NO_TARGET) < 6
    second = outputs(data_dir, Windows("validation", 1, 1), "hidden", step=5)
    assert list(second) == [IDS, "hidden"]
    assert np.array_equal(second["hidden"][0], whole["hidden"][1])


def test_what_is_not_there_is_refused_in_words(data_dir: Path) -> None:
    """A window, an output, a checkpoint; and an output that is called as the windows are."""
    with pytest.raises(UserError, match=r"the train split has .* windows of 6, not 9999 to 9999"):
        outputs(data_dir, Windows("train", 9999, 1))
    with pytest.raises(UserError, match="has no output 'logit'"):
        outputs(data_dir, Windows("train", 0, 1), "logit")
    with pytest.raises(NotFound):
        outputs(data_dir, Windows("train", 0, 1), session="nobody")
    asyncio.run(save_network(FileStorage(data_dir), SessionId("odd"), DECLARED.replace("name: hidden", "name: ids"), dataset="text"))
    with pytest.raises(UserError, match="an output is called 'ids'"):
        outputs(data_dir, Windows("train", 0, 1), session="odd")
    assert list(outputs(data_dir, Windows("train", 0, 1), "logits", session="odd")) == [IDS, "logits"]
