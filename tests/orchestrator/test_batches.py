"""What a session is fed comes from its dataset: training batches by step, validation windows in order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import numpy as np
import pytest

from dcnr.data.dataset import NO_TARGET, Dataset
from dcnr.errors import UserError
from dcnr.ids import Epoch
from dcnr.orchestrator.batches import Batches
from dcnr.orchestrator.commands import ReadBatch, ReadWindows
from dcnr.orchestrator.events import BatchRead, WindowsRead
from dcnr.storage.file import FileStorage
from tests.orchestrator.fakes import SESSION
from tests.orchestrator.running import make_data

SEQ_LEN = 4


def windows(batches: Batches, micro: int, rows: int, dataset: str = "text") -> WindowsRead:
    """One micro-batch of the validation split."""
    read = batches.read(ReadWindows(SESSION, Epoch(1), dataset, 8, micro, rows, SEQ_LEN))
    assert isinstance(read, WindowsRead)
    return read


def test_a_step_gets_the_batch_of_its_number(tmp_path: Path) -> None:
    """As the dataset has it."""
    make_data(tmp_path)
    read = Batches(tmp_path, FileStorage(tmp_path)).read(ReadBatch(SESSION, Epoch(1), "text", 7, 3, 2, SEQ_LEN))
    assert isinstance(read, BatchRead)
    assert (read.session, read.epoch, read.step) == (SESSION, Epoch(1), 3)
    assert np.array_equal(read.tokens_BS, Dataset.open(tmp_path, "text").batch("train", 7, 3, 2, SEQ_LEN))


def test_validation_reads_every_target_of_the_split_once(tmp_path: Path) -> None:
    """Micro-batch by micro-batch."""
    make_data(tmp_path)
    batches, dataset = Batches(tmp_path, FileStorage(tmp_path)), Dataset.open(tmp_path, "text")
    there = dataset.windows("validation", SEQ_LEN)
    rows = [windows(batches, micro, 2) for micro in range(-(-there // 2))]
    assert {one.windows for one in rows} == {there}
    targets = np.concatenate([one.tokens_BS[:, 1:] for one in rows]).reshape(-1)
    assert np.count_nonzero(targets != NO_TARGET) == dataset.manifest.tokens("validation") - 1
    assert rows[0].bytes_per_token == dataset.manifest.bytes_of("validation") / dataset.manifest.tokens("validation")


def test_a_dataset_that_was_made_anew_without_a_validation_split_is_refused_in_words(tmp_path: Path) -> None:
    """A validation of nothing would never end."""
    make_data(tmp_path)
    Dataset.create(tmp_path, "bare", [tmp_path / "text.txt"], "chars", seq_len=SEQ_LEN, validation=0.0)
    batches = Batches(tmp_path, FileStorage(tmp_path))
    with pytest.raises(UserError, match="dataset 'bare', which was made anew, has nothing to validate on"):
        windows(batches, 0, 2, "bare")


def test_a_dataset_is_opened_once_for_a_deployment_whoever_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads ask at the same time: the second waits for the first."""
    make_data(tmp_path)
    together, opened = Barrier(2), []

    def opening(*where: object) -> Dataset:
        with suppress(BrokenBarrierError):
            together.wait(0.2)
        opened.append(where)
        return dataset

    dataset = Dataset.open(tmp_path, "text")
    monkeypatch.setattr(Dataset, "open", opening)
    batches = Batches(tmp_path, FileStorage(tmp_path))
    with ThreadPoolExecutor(2) as threads:
        assert len({one.windows for one in threads.map(lambda micro: windows(batches, micro, 2), range(2))}) == 1
    assert len(opened) == 1
