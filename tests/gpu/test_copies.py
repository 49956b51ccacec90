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


def test_much_goes_in_pieces(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of all sizes, cut anywhere; the device needs room for two pieces, and later work does no harm."""
    from dcnr.backends.cupy import copies  # imports CuPy

    monkeypatch.setattr(copies, "PIECE", 1 << 20)
    draw = np.random.default_rng(0)
    hosts = [draw.integers(0, 255, size, np.uint8) for size in (0, 1, 255, 257, 3 << 20, (1 << 20) - 256, 5, (9 << 20) + 7, 40 << 20)]
    given = [device.empty(host.shape, host.dtype) for host in hosts]
    for array, host in zip(given, hosts, strict=True):
        device.upload(array, host)
    held = device.memory().used
    fetch = device.fetch(given)
    for array in given:
        device.clear(array)
    for host, back in zip(hosts, fetch.wait(), strict=True):
        assert np.array_equal(host, back)
    assert device.memory().used <= held + copies.STAGES * copies.PIECE


def test_what_nobody_waits_for_does_no_harm(device: CudaDevice) -> None:
    """A fetch that was dropped still has its memory until it is done."""
    x, y = (arrays.zeros(device, (16 << 20,), np.dtype(np.float32)) for _ in range(2))
    arrays.set_scalars(device, [x[-1], y[-1]], [1.0, 2.0])
    for _ in range(5):
        device.fetch([x])
        (found,) = device.fetch([y]).wait()
        assert (found[0], found[-1]) == (0, 2)
