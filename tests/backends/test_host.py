"""What a backend answers whose device is the host."""

from __future__ import annotations

import numpy as np

from dcnr.backends.host import HostOps

host = HostOps()


def test_scalars_are_plain_numbers() -> None:
    """New values stand for the old ones."""
    assert host.scalar(3) == 3
    assert list(host.set_scalars([host.scalar(1), host.scalar(2.0)], [5, 6.0])) == [5, 6.0]


def test_what_is_fetched_is_a_copy() -> None:
    """Work that is issued later may overwrite the array; scalars come as 0-d arrays."""
    x = np.arange(3.0)
    fetch = host.fetch([x, 0.5])
    x[:] = 7
    copy, number = fetch.wait()
    np.testing.assert_array_equal(copy, [0, 1, 2])
    assert (number.shape, float(number)) == ((), 0.5)


def test_there_is_no_device_that_works_on_its_own() -> None:
    """So no step ends there, and nothing is recorded."""
    assert host.step_end([], [], 1.0) is None
    assert host.recording() is None
    host.synchronize()
