"""Embeddings and the sorted gradient, against the NumPy backend, with threads and blocks in either order."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from dcnr.backends.base import HostArray
from dcnr.backends.cupy import embedding
from dcnr.backends.cupy.array import Dtype
from dcnr.backends.dtypes import precision_of
from dcnr.backends.load import load_backend
from dcnr.errors import InvariantError
from tests.backends.cupy.emulator.device import EmulatedDevice, get, put
from tests.tolerances import assert_close

NUMPY = load_backend("numpy")
FLOAT32, FLOAT16, BFLOAT16 = STORED = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
SHAPES = ((1, 1, 1, 1), (3, 7, 33, 8), (2, 127, 513, 33), (1, 129, 300, 264), (2, 40, 20, 520))
"""B, T, V, D: whole vectors and not, one column tile and several."""


def draw(*shape: int, dtype: Dtype = FLOAT32, seed: int = 0) -> HostArray:
    """Normal numbers that depend on the shape and the seed alone."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def ids_of(kind: str, rows: int, vocabulary: int) -> HostArray:
    """Ids as data has them: all as likely, few of them most of the time, or only one."""
    rng = np.random.default_rng((rows, vocabulary))
    match kind:
        case "uniform":
            return rng.integers(0, vocabulary, rows)
        case "zipf":
            return np.minimum(rng.zipf(1.2, rows), vocabulary) - 1
        case _:
            return np.full(rows, vocabulary - 1)


@pytest.mark.parametrize(
    ("stored", "table", "positions"),
    [
        *((stored, stored, None) for stored in STORED),
        *((stored, table, FLOAT32) for stored in STORED for table in STORED if stored != table),
        (FLOAT16, FLOAT16, FLOAT16),
        (FLOAT16, FLOAT32, BFLOAT16),
    ],
)
def test_embedding(stored: Dtype, table: Dtype, positions: Dtype | None) -> None:
    """Any mixture of dtypes, to the bit; rows of whole vectors and not."""
    device = EmulatedDevice()
    for B, T, V, D in SHAPES[1:3]:
        ids, w = ids_of("uniform", B * T, V).reshape(B, T), draw(V, D, dtype=table)
        p = None if positions is None else draw(T + 3, D, dtype=positions, seed=1)
        y = embedding.embedding(device, put(device, ids), put(device, w), None if p is None else put(device, p), precision_of(stored))
        assert y.dtype == stored
        assert get(y).tobytes() == NUMPY.embedding(ids, w, p, precision_of(stored)).tobytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_embedding_of_any_shape(shape: tuple[int, int, int, int]) -> None:
    """Also of tables that do not start at a 16-byte boundary."""
    B, T, V, D = shape
    device = EmulatedDevice()
    ids, raw = ids_of("uniform", B * T, V).reshape(B, T), draw(V * D + 1, dtype=FLOAT16)
    for start in (0, 1):
        w = put(device, raw)[start : start + V * D].reshape(V, D)
        y = embedding.embedding(device, put(device, ids), w, None, "float16")
        assert np.array_equal(get(y), raw[start : start + V * D].reshape(V, D)[ids])


def test_ids_outside_of_the_table_show() -> None:
    """Their rows are NaN, and nothing outside of the table is read; backward they change nothing."""
    device = EmulatedDevice()
    ids = put(device, np.array([[0, -1, 3, 2**40]]))
    y = get(embedding.embedding(device, ids, put(device, np.ones((3, 8), np.float16)), None, "float16"))
    assert np.isnan(y[0]).all(axis=1).tolist() == [False, True, True, True]
    into = put(device, np.zeros((3, 8), np.float32))
    embedding.embedding_backward(device, put(device, np.ones((1, 4, 8), np.float16)), ids, into, None, True)
    assert get(into).tolist() == [[1.0] * 8, [0.0] * 8, [0.0] * 8]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kind", ["uniform", "zipf", "one"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape: tuple[int, int, int, int], kind: str, stored: Dtype, accumulate: bool) -> None:
    """Sums per id and per position, written or added, bit-equal in either order of threads, without waiting for the device."""
    B, T, V, D = shape
    ids, dy = ids_of(kind, B * T, V).reshape(B, T), draw(B, T, D, dtype=stored)
    results = []
    for reverse in (False, True):
        device = EmulatedDevice(reverse=reverse)
        into, positions = put(device, draw(V, D)), put(device, draw(T + 3, D))
        embedding.embedding_backward(device, put(device, dy), put(device, ids), into, positions, accumulate)
        assert device.waits == 0
        results.append((get(into), get(positions)))
    assert [a.tobytes() for a in results[0]] == [a.tobytes() for a in results[1]]
    wanted = draw(V, D), draw(T + 3, D)
    NUMPY.embedding_backward(dy, ids, *wanted, accumulate)
    for name, actual, right in zip(("table", "positions"), results[0], wanted, strict=True):
        assert_close(actual, right, "float32", name)


def test_gradients_may_start_anywhere() -> None:
    """Accumulators and gradients that do not start at a 16-byte boundary."""
    device = EmulatedDevice()
    ids, raw, into = ids_of("zipf", 70, 9).reshape(2, 35), draw(70 * 16 + 1, dtype=FLOAT16), put(device, np.ones(9 * 16 + 1, np.float32))
    table = into[1:].reshape(9, 16)
    embedding.embedding_backward(device, put(device, raw)[1:].reshape(2, 35, 16), put(device, ids), table, None, False)
    wanted = np.empty((9, 16), np.float32)
    NUMPY.embedding_backward(raw[1:].reshape(2, 35, 16), ids, wanted, None, False)
    assert_close(get(table), wanted, "float32")
    assert get(into)[0] == 1


def test_no_rows_have_no_gradient() -> None:
    """What is not added to becomes zero."""
    device = EmulatedDevice()
    into, positions = put(device, draw(5, 8)), put(device, draw(4, 8))
    none, nobody = put(device, np.zeros((0, 3, 8), np.float16)), put(device, np.zeros((0, 3), np.int64))
    assert embedding.embedding(device, nobody, into, positions, "float16").shape == (0, 3, 8)
    embedding.embedding_backward(device, none, nobody, into, positions, True)
    assert np.array_equal(get(into), draw(5, 8))
    assert np.array_equal(get(positions), draw(4, 8))
    embedding.embedding_backward(device, none, nobody, into, positions, False)
    assert not get(into).any()
    assert not get(positions).any()


def test_ids_of_another_dtype_are_a_bug() -> None:
    """Kernels would read them as int64."""
    device, ids = EmulatedDevice(), np.zeros((1, 4), np.int32)
    with pytest.raises(InvariantError, match="int32"):
        embedding.embedding(device, put(device, ids), put(device, draw(5, 8)), None, "float16")
    with pytest.raises(InvariantError, match="int32"):
        embedding.embedding_backward(device, put(device, draw(1, 4, 8)), put(device, ids), put(device, draw(5, 8)), None, False)


@pytest.mark.parametrize("kind", ["uniform", "zipf", "one"])
@pytest.mark.parametrize("vocabulary", [1, 255, 256, 1000, 65_536, 2**20])
@pytest.mark.parametrize("rows", [1, 31, 256, 257, 3000])
def test_the_sort_is_stable(rows: int, vocabulary: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NumPy's, over one block and several, each with one turn and several."""
    monkeypatch.setattr(embedding, "SORT_BLOCKS", 5)
    device, ids = EmulatedDevice(reverse=rows % 2 == 0), ids_of(kind, rows, vocabulary)
    order = embedding.sort(device, put(device, ids), vocabulary)
    assert np.array_equal(get(order.rows_N), np.argsort(ids, kind="stable"))
    assert np.array_equal(get(order.keys_N), np.sort(ids))


def test_the_sort_puts_strangers_last() -> None:
    """Ids outside of the vocabulary, in the order of rows, as the vocabulary's size."""
    device = EmulatedDevice()
    order = embedding.sort(device, put(device, np.array([-1, 5, 2, 4, 2**33])), 5)
    assert get(order.keys_N).tolist() == [2, 4, 5, 5, 5]
    assert get(order.rows_N).tolist() == [2, 3, 0, 1, 4]
