"""Blocks come back when the last reference dies, and never before."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dcnr.backends.cpu.pool import ALIGNMENT, Pool


def test_a_block_is_used_again() -> None:
    """Same size class, same memory, nothing more held."""
    pool = Pool()
    first = pool.empty((100, 100))
    address, held = first.ctypes.data, pool.held
    del first
    second = pool.empty((99, 101))
    assert (second.ctypes.data, pool.held) == (address, held)
    assert pool.idle == 0


@pytest.mark.parametrize("view", [lambda a: a[3:], lambda a: a.reshape(-1)[5:].T, lambda a: a.view(np.uint32)[::2], memoryview])
def test_a_view_keeps_its_block(view: object) -> None:
    """However far it is from the array that was handed out."""
    assert callable(view)
    pool = Pool()
    kept = view(pool.empty((64, 64)))
    others = [pool.empty((64, 64)) for _ in range(4)]
    assert not any(np.shares_memory(np.asarray(kept), other) for other in others)
    assert pool.idle == 0
    del kept
    gc.collect()
    assert pool.idle > 0


def test_arrays_in_use_never_overlap() -> None:
    """Different sizes too."""
    pool = Pool()
    arrays = [pool.empty((n,)) for n in (1000, 2000, 2047, 2048, 2049, 5000) for _ in range(3)]
    for index, array in enumerate(arrays):
        array.fill(index)
    assert all((array == index).all() for index, array in enumerate(arrays))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 33), (1024, 1024), (3, 1, 5000)])
def test_shapes_and_alignment(shape: tuple[int, ...]) -> None:
    """Every shape; large ones start on a cache line."""
    array = Pool().empty(shape, np.dtype(np.float32))
    assert array.shape == shape
    assert array.flags.c_contiguous
    assert type(array) is np.ndarray
    if array.nbytes >= 4096:
        assert array.ctypes.data % ALIGNMENT == 0


def test_a_class_wastes_at_most_a_quarter() -> None:
    """Four classes to each doubling."""
    for count in (1025, 1281, 2**20 + 1, 3 * 2**20 + 1):
        pool = Pool()
        array = pool.empty((count,))
        assert array.nbytes <= pool.held <= 1.26 * array.nbytes


def test_threads_share_a_pool() -> None:
    """Blocks that change threads are never in two hands."""
    pool = Pool()

    def work(mark: int) -> bool:
        good = True
        for _ in range(300):
            a, b = pool.empty((2000,)), pool.empty((2000,))
            a.fill(mark)
            b.fill(-mark)
            good &= bool((a == mark).all() and (b == -mark).all())
        return good

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(1, 9)))
    assert pool.idle == pool.held
    assert pool.held <= 8 * 10 * 2000 * 4


def test_idle_blocks_go_when_sizes_change() -> None:
    """A machine's memory does not fill with blocks that no network needs any more."""
    pool = Pool(keep_idle=100_000)
    del_me = [pool.empty((10_000,)) for _ in range(10)]
    del del_me
    assert pool.idle >= 400_000
    kept = pool.empty((20_000,))
    assert pool.idle == 0
    assert kept.nbytes <= pool.held < 110_000
