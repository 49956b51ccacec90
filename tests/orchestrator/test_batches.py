"""What a session is fed comes from its dataset: training batches by step, validation windows in order."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dcnr.data.dataset import NO_TARGET, Dataset
from dcnr.ids import Epoch
from dcnr.orchestrator.batches import Batches
from dcnr.orchestrator.commands import ReadBatch, ReadWindows
from dcnr.orchestrator.events import BatchRead, WindowsRead
from dcnr.storage.file import FileStorage
from tests.orchestrator.fakes import SESSION
from tests.orchestrator.running import make_data

SEQ_LEN = 4


def windows(batches: Batches, micro: int, rows: int) -> WindowsRead:
    """One micro-batch of the validation split."""
    read = batches.read(ReadWindows(SESSION, Epoch(1), "text", 8, micro, rows, SEQ_LEN))
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
    """Micro-batch by micro-batch; beyond the last window there is nothing."""
    make_data(tmp_path)
    batches, dataset = Batches(tmp_path, FileStorage(tmp_path)), Dataset.open(tmp_path, "text")
    there = dataset.windows("validation", SEQ_LEN)
    rows = [windows(batches, micro, 2) for micro in range(-(-there // 2))]
    assert {one.windows for one in rows} == {there}
    targets = np.concatenate([one.tokens_BS[:, 1:] for one in rows]).reshape(-1)
    assert np.count_nonzero(targets != NO_TARGET) == dataset.manifest.tokens("validation") - 1
    assert windows(batches, len(rows), 2).tokens_BS.shape == (0, SEQ_LEN + 1)
    assert rows[0].bytes_per_token == dataset.manifest.bytes_of("validation") / dataset.manifest.tokens("validation")
