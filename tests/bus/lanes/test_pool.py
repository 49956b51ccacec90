"""Buffers come back when nothing refers to them, and not before."""

from __future__ import annotations

import gc

import numpy as np

from dcnr.bus.lanes.pool import POOLED_FROM, Pool


def address(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> int:
    """Where its memory is."""
    return int(array.__array_interface__["data"][0])


def test_a_dropped_buffer_is_used_again() -> None:
    """For any length that rounds to the same size."""
    pool = Pool()
    first = pool.take(POOLED_FROM)
    where = address(first)
    del first
    gc.collect()
    again = pool.take(POOLED_FROM - 1 + 1)
    assert address(again) == where
    assert again.flags.writeable


def test_views_keep_a_buffer_out_of_the_pool() -> None:
    """Also views of views, of another type."""
    pool = Pool()
    view = pool.take(POOLED_FROM).view(np.float32).reshape(4, -1)[1:]
    view[:] = 7
    others = [pool.take(POOLED_FROM) for _ in range(5)]
    for other in others:
        other[:] = 0
    assert (view == 7).all()


def test_small_arrays_are_plain() -> None:
    """Not worth keeping."""
    assert Pool().take(POOLED_FROM - 1).base is None


def test_what_is_kept_is_bounded() -> None:
    """Many dropped at once leave only some behind."""
    pool = Pool()
    size = 64 << 20
    held = [pool.take(size) for _ in range(4)]
    held.clear()
    gc.collect()
    assert sum(buffer.nbytes for free in pool._free.values() for buffer in free) == 2 * size
