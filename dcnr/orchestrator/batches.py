"""What a session is fed, read from its dataset. The methods block; call them from a thread.

Rule: a dataset is opened once for each deployment, so that one that was made anew meanwhile is seen by the next.
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock

from dcnr.data.dataset import Dataset
from dcnr.errors import UserError
from dcnr.ids import Epoch, SessionId
from dcnr.orchestrator.commands import ReadBatch, ReadWindows
from dcnr.orchestrator.events import BatchRead, WindowsRead
from dcnr.storage.base import Storage


class Batches:
    """Of all sessions of a leader."""

    def __init__(self, data_dir: Path, storage: Storage) -> None:
        self._data_dir = data_dir
        self._storage = storage
        self._datasets: dict[SessionId, tuple[Epoch, Dataset]] = {}
        self._opening: dict[SessionId, Lock] = {}
        """Several threads read for a session at once."""

    def read(self, ask: ReadBatch | ReadWindows) -> BatchRead | WindowsRead:
        """The ids that are asked for. Raises `DcnrError` or `OSError` if the dataset does not give them."""
        if isinstance(ask, ReadWindows):
            return self._windows(ask)
        tokens_BS = self._dataset(ask).batch("train", ask.seed, ask.step, ask.batch, ask.seq_len)
        return BatchRead(ask.session, ask.epoch, ask.step, tokens_BS)

    def forget(self, session: SessionId) -> None:
        """It is fed no more."""
        self._datasets.pop(session, None)
        self._opening.pop(session, None)

    def _windows(self, ask: ReadWindows) -> WindowsRead:
        """Those of one micro-batch, of which the last may have fewer."""
        dataset, first = self._dataset(ask), ask.micro * ask.rows
        there = dataset.windows("validation", ask.seq_len)
        if not there:
            raise UserError(f"dataset '{ask.dataset}', which was made anew, has nothing to validate on", "make it with a validation split")
        tokens_BS = dataset.window_rows("validation", first, min(ask.rows, there - first), ask.seq_len)
        per_token = dataset.manifest.bytes_of("validation") / max(1, dataset.manifest.tokens("validation"))
        return WindowsRead(ask.session, ask.epoch, ask.step, ask.micro, there, per_token, tokens_BS)

    def _dataset(self, ask: ReadBatch | ReadWindows) -> Dataset:
        with self._opening.setdefault(ask.session, Lock()):
            epoch, dataset = self._datasets.get(ask.session, (None, None))
            if dataset is None or epoch != ask.epoch:
                dataset = Dataset.open(self._data_dir, ask.dataset, self._storage)
                self._datasets[ask.session] = (ask.epoch, dataset)
            return dataset
