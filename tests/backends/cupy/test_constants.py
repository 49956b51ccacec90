"""Constants are made once, few are kept, and none goes that somebody works with."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from dcnr.backends.cupy.array import DeviceArray
from dcnr.backends.cupy.constants import MOST, Constants


class Maker:
    """Counts what it makes."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> DeviceArray:
        self.made += 1
        return DeviceArray(self.made, (), np.dtype(np.float32), None)


def test_the_last_ones_are_kept() -> None:
    """What was used lately stays, what was not is made again."""
    constants, make = Constants(), Maker()
    first = constants.get(0, make)
    for key in range(1, MOST):
        constants.get(key, make)
    assert constants.get(0, make) is first
    constants.get(MOST, make)
    assert make.made == MOST + 1
    assert constants.get(0, make) is first
    constants.get(1, make)
    assert make.made == MOST + 2


def test_what_somebody_keeps_is_found_again() -> None:
    """However many others came by: the addresses of a recording stay what they are."""
    constants, make = Constants(), Maker()
    kept: dict[Hashable, DeviceArray] = {}
    first = constants.get("turns", make, kept)
    for key in range(2 * MOST):
        constants.get(key, make)
    assert constants.get("turns", make, kept) is first
    assert constants.get("turns", make) is first
    assert kept == {"turns": first}
