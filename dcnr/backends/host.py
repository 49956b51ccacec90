"""What backends have in common whose device is the host: nothing is ever under way, so step-varying numbers are plain numbers, reading an
array back is a copy, and there is neither a step to end on the device nor anything to record."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcnr.backends.base import Array, HostArray, Recording, Scalar, StepEnd, Trained


@dataclass(frozen=True, slots=True)
class HostFetch:
    """A copy that is complete."""

    arrays: list[HostArray]

    def wait(self) -> list[HostArray]:
        """The copies."""
        return self.arrays


class HostOps:
    """The part of a `Backend` that exists for the sake of devices that work on their own."""

    @property
    def device(self) -> str:
        """The kind of processor."""
        return platform.processor() or platform.machine()

    def synchronize(self) -> None:
        """Every operation is done when it returns."""

    def scalar(self, value: float) -> Scalar:
        """The value itself."""
        return value

    def set_scalars(self, scalars: Sequence[Scalar], values: Sequence[float]) -> Sequence[Scalar]:
        """The values themselves."""
        return values

    def fetch(self, arrays: Sequence[Array | Scalar]) -> HostFetch:
        """Copies of all of them, scalars as 0-d arrays."""
        return HostFetch([np.array(x) for x in arrays])

    def step_end(self, trained: Sequence[Trained], groups: Sequence[int], loss_scale: Scalar) -> StepEnd | None:
        """None: threads update parameters one by one."""
        return None

    def ipc(self) -> None:
        return None

    def recording(self, beside: Recording | None = None) -> Recording | None:
        """None: a call costs no more than a replay would."""
        return None
