"""SM clock and power of a GPU while something runs. Without them step times cannot be compared: a card at its power limit slows down.

Needs `pynvml`; without it, or without a GPU, there is nothing to read and `Reading` is empty.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import threading
from types import TracebackType
from typing import Any, NamedTuple, Self

EVERY = 0.1
"""Seconds between two samples."""
SM_CLOCK = 1
"""NVML_CLOCK_SM"""


class Reading(NamedTuple):
    """Medians, over the later two thirds of the time; None where nothing could be read."""

    mhz: float | None
    watts: float | None


class Clocks:
    """A context that samples while its block runs; `reading` is there afterwards."""

    def __init__(self, device: int) -> None:
        self._nvml = _nvml()
        self._handle = self._nvml.nvmlDeviceGetHandleByIndex(device) if self._nvml is not None else None
        self._samples: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.reading = Reading(None, None)

    def __enter__(self) -> Self:
        if self._nvml is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._nvml is None:
            return
        self._over.set()
        self._thread.join()
        late = self._samples[len(self._samples) // 3 :]
        if late:
            self.reading = Reading(*(statistics.median(column) for column in zip(*late, strict=True)))

    def _sample(self) -> None:
        while not self._over.wait(EVERY):
            clock = self._nvml.nvmlDeviceGetClockInfo(self._handle, SM_CLOCK)
            self._samples.append((float(clock), self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000))


def _nvml() -> Any:
    """The module, ready to be asked; None where there is none or no driver."""
    if importlib.util.find_spec("pynvml") is None:
        return None
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml
