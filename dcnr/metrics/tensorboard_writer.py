"""A training log for TensorBoard: a folder of event files for each session, so that several sessions can be compared.

Rule 1: the events of a session that are there already are gone on with, in a file of their own, as TensorBoard reads them.
Rule 2: event files are records of `length, checksum, bytes, checksum`; one that a crash cut short ends its file.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dcnr.bus.messages import StepMetrics, ValidationMetrics
from dcnr.errors import UserError
from dcnr.ids import SessionId

SCALARS = ("loss", "lr", "grad_norm", "loss_scale", "tokens_per_s", "step_ms", "mfu")
VALIDATION_SCALARS = ("loss", "perplexity", "bits_per_byte")
TRAIN, VALIDATION = "train/", "validation/"
FLUSH_EVERY = 10
"""Seconds until what was written can be seen."""

_LENGTH = struct.Struct("<Q")
_CHECKSUM = 4


class TensorBoardWriter:
    """A `Writer` of events in `folder/<session>`. Raises `UserError` if they hold the run already and it is `new`."""

    def __init__(self, folder: Path, session: SessionId, new: bool = False) -> None:
        self._folder = folder / session
        self.name = str(self._folder)
        self.last_step = self.last_validation = 0
        self._records: Any = None
        self._flush_at = 0.0
        for tag, step, _ in read_scalars(self._folder):
            if tag.startswith(VALIDATION):
                self.last_validation = max(self.last_validation, step)
            else:
                self.last_step = max(self.last_step, step)
        if new and self.last_step:
            raise UserError(f"{self.name} holds session '{session}' already", "name another folder, or remove it")

    def step(self, row: StepMetrics) -> None:
        """Write a step."""
        self._add(TRAIN, SCALARS, row)
        self.last_step = row.step

    def validation(self, row: ValidationMetrics) -> None:
        """Write a validation."""
        self._add(VALIDATION, VALIDATION_SCALARS, row)
        self.last_validation = row.step

    def close(self) -> None:
        """Everything is written."""
        if self._records is not None:
            self._records.close()

    def _add(self, prefix: str, names: tuple[str, ...], row: StepMetrics | ValidationMetrics) -> None:
        from tensorboardX.proto.event_pb2 import Event  # seconds: only for those who write
        from tensorboardX.proto.summary_pb2 import Summary

        if self._records is None:
            self._records = self._open()
            self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        values = {prefix + name: getattr(row, name) for name in names}
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items() if value is not None]
        self._records.write(Event(wall_time=time.time(), step=row.step, summary=Summary(value=scalars)).SerializeToString())
        if time.monotonic() >= self._flush_at:
            self._records.flush()
            self._flush_at = time.monotonic() + FLUSH_EVERY

    def _open(self) -> Any:
        """A new file. Not a `SummaryWriter`: its thread dies of a full disk, and whoever writes then waits for it for ever."""
        from tensorboardX.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        # the step, since names by the second alone would write over an older file
        return RecordWriter(str(self._folder / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.after-{self.last_step}"))


def read_scalars(folder: Path) -> Iterator[tuple[str, int, float]]:
    """(tag, step, value) of all scalars in the event files of a folder, as they were written."""
    files = sorted(folder.glob("events.out.tfevents.*"))
    if not files:
        return
    from tensorboardX.proto.event_pb2 import Event

    for file in files:
        for record in _records(file.read_bytes()):
            event = Event.FromString(record)
            for value in event.summary.value:
                yield value.tag, event.step, value.simple_value


def _records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + _LENGTH.size + _CHECKSUM <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        start = at + _LENGTH.size + _CHECKSUM
        at = start + length + _CHECKSUM
        if at > len(data):
            return
        yield data[start : start + length]
