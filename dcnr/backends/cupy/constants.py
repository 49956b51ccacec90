"""Arrays of a device that never change, such as tables of angles: made when they are first asked for.

Rule: few are kept for their own sake, the last that were asked for; a recording keeps what it used, since it has their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from dcnr.backends.cupy.array import DeviceArray

MOST = 8


class Constants:
    """Of one device. The caller holds its lock."""

    def __init__(self) -> None:
        self._recent: dict[Hashable, DeviceArray] = {}

    def get(self, key: Hashable, make: Callable[[], DeviceArray], kept: dict[Hashable, DeviceArray] | None = None) -> DeviceArray:
        """What `make` gave for `key`. `kept` belongs to whoever goes on using the array: it is looked up there first, and stays there."""
        array = self._recent.pop(key, None)
        if kept is not None and key in kept:
            array = kept[key]
        if array is None:
            array = make()
        self._recent[key] = array
        if len(self._recent) > MOST:
            del self._recent[next(iter(self._recent))]
        if kept is not None:
            kept[key] = array
        return array
