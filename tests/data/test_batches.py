"""Which windows a step sees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcnr.data.batches import MAX_BATCH, MAX_SEED, MAX_STEP, Starts, batch_starts, epoch_starts, gather, windows_per_epoch

LENGTHS = st.integers(1, 40).flatmap(lambda seq_len: st.tuples(st.integers(seq_len + 1, 700), st.just(seq_len)))


def starts_of(tokens: int, seq_len: int, seed: int, step: int, batch: int) -> Starts:
    """Of one step, nothing remembered."""
    return batch_starts(lambda epoch: epoch_starts(tokens, seq_len, seed, epoch), windows_per_epoch(tokens, seq_len), step, batch)


@settings(deadline=None)
@given(lengths=LENGTHS, seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 2**40))
def test_an_epoch_is_a_permutation_of_windows_inside_the_split(lengths: tuple[int, int], seed: int, epoch: int) -> None:
    """Each starts T after another one; the offset is below T; the last one ends within the split."""
    tokens, seq_len = lengths
    starts = epoch_starts(tokens, seq_len, seed, epoch)
    ordered = np.sort(starts)
    assert len(starts) == windows_per_epoch(tokens, seq_len)
    assert (np.diff(ordered) == seq_len).all()
    assert 0 <= ordered[0] < seq_len
    assert ordered[-1] + seq_len + 1 <= tokens


def test_the_last_possible_step_has_its_windows() -> None:
    """Also where one window is an epoch, so that epochs are counted beyond 64 bits."""
    starts = starts_of(tokens=3, seq_len=2, seed=MAX_SEED, step=MAX_STEP, batch=3)
    assert starts.tolist() == [0, 0, 0]
    assert len(starts_of(tokens=8001, seq_len=2, seed=MAX_SEED, step=MAX_STEP, batch=MAX_BATCH)) == MAX_BATCH
    assert epoch_starts(3, 2, 1, MAX_STEP * MAX_BATCH).tolist() == [0]


@settings(deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 2**32), batch=st.integers(1, 50), steps=st.integers(1, 20))
def test_steps_take_the_stream_of_epochs_in_order(lengths: tuple[int, int], seed: int, batch: int, steps: int) -> None:
    """So every window is seen once per epoch, also where an epoch has fewer windows than a batch."""
    tokens, seq_len = lengths
    windows = windows_per_epoch(tokens, seq_len)
    epochs = -(-steps * batch // windows)
    stream = np.concatenate([epoch_starts(tokens, seq_len, seed, epoch) for epoch in range(epochs)])
    taken = np.concatenate([starts_of(tokens, seq_len, seed, step, batch) for step in range(1, steps + 1)])
    assert (taken == stream[: steps * batch]).all()


def test_a_far_step_is_as_near_as_the_first() -> None:
    """Its epoch is found by division: only the epochs it touches are drawn."""
    asked: list[int] = []

    def order(epoch: int) -> Starts:
        asked.append(epoch)
        return epoch_starts(1000, 10, 1, epoch)

    batch_starts(order, windows_per_epoch(1000, 10), step=10**12, batch=7)
    assert len(asked) <= 2


def test_seed_and_epoch_change_order_and_offset() -> None:
    """Over 40 epochs every offset below T = 4 occurs, and no two orders are equal."""
    epochs = [epoch_starts(400, 4, 7, epoch) for epoch in range(40)]
    assert {int(starts.min()) for starts in epochs} == {0, 1, 2, 3}
    assert len({starts.tobytes() for starts in epochs}) == 40
    assert epoch_starts(400, 4, 8, 0).tobytes() != epochs[0].tobytes()


@pytest.mark.parametrize(("tokens", "windows"), [(6, 1), (9, 1), (10, 1), (14, 1), (15, 2), (20, 3), (1_000_000, 199_999)])
def test_windows_of_five(tokens: int, windows: int) -> None:
    """N // T - 1, at least one."""
    assert windows_per_epoch(tokens, 5) == windows


def test_the_choice_is_recorded() -> None:
    """A change of these numbers changes every training run that anybody has made. Step 3 begins with the last window of epoch 0."""
    assert starts_of(101, 10, 1234, 1, 4).tolist() == [43, 13, 63, 83]
    assert starts_of(101, 10, 1234, 3, 4).tolist() == [3, 86, 26, 76]


def test_gather_reads_windows_as_int64() -> None:
    """Whatever they are stored as; the caller's array is its own."""
    ids = np.arange(10, dtype="<u2")
    out = gather(lambda start, stop: ids[start:stop], np.array([3, 0, 6]), 3)
    assert out.dtype == np.int64
    assert out.tolist() == [[3, 4, 5, 6], [0, 1, 2, 3], [6, 7, 8, 9]]
    out[0, 0] = 99
    assert ids[3] == 3
