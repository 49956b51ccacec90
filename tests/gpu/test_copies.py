"""Fetches and uploads at the same time as other work."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dcnr.backends.cupy import arrays

if TYPE_CHECKING:
    from dcnr.backends.cupy.cuda import CudaDevice

pytestmark = pytest.mark.gpu


def test_any_thread_may_wait(device: CudaDevice) -> None:
    """For what another thread asked for, several times, and the arrays outlive what they were copied from."""
    x = arrays.from_host(device, np.arange(1 << 20, dtype=np.float32), None)
    fetch = device.fetch([x, x[:0], x[5]])
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: fetch.wait(), range(8)))
    del x
    for whole, nothing, one in found:
        assert np.array_equal(whole, np.arange(1 << 20))
        assert (nothing.shape, one.shape, one.item()) == ((0,), (), 5)


def test_memory_of_a_fetch_is_used_again(device: CudaDevice) -> None:
    """Hundreds of them hold no more than a few at a time."""
    x = arrays.zeros(device, (1 << 20,), np.dtype(np.float32))
    device.fetch([x]).wait()
    held = device.memory().used
    for _ in range(200):
        device.fetch([x]).wait()
    assert device.memory().used <= held + 2 * x.nbytes
