"""What all lanes share: checks of headers, and arrays as bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dcnr.bus.lanes.base import DTYPES, TENSOR_LIMIT, Port, bytes_of, check
from dcnr.bus.memory import MemoryBroker
from dcnr.errors import PeerError
from dcnr.ids import PNodeId
from tests.bus.lanes.contract import hop_for

HOP = hop_for(np.zeros((2, 3), np.float32), 1, PNodeId("p"))


def test_good_headers_pass() -> None:
    """Scalars, empty tensors and bfloat16 too."""
    check(HOP)
    check(replace(HOP, shape=(), nbytes=4))
    check(replace(HOP, shape=(0, 5), nbytes=0))
    check(replace(HOP, dtype="bfloat16", nbytes=12))
    check(replace(HOP, codec="fp16", nbytes=12))
    check(replace(HOP, codec="int8", nbytes=10))


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "object"},
        {"dtype": "float128"},
        {"nbytes": 23},
        {"nbytes": -24, "shape": (-2, 3)},
        {"shape": (-2, -3)},
        {"shape": (1 << 40, 1 << 40)},
        {"shape": (TENSOR_LIMIT // 4 + 1,), "nbytes": TENSOR_LIMIT + 4},
        {"version": 2},
        {"codec": "zip"},
        {"codec": "native"},
        {"codec": "fp16"},
        {"codec": "fp16", "dtype": "float16", "nbytes": 12},
        {"codec": "int8", "dtype": "int64", "nbytes": 10},
        {"codec": "int8", "shape": (1 << 40,), "nbytes": (1 << 40) + (1 << 36)},
        {"targets": ()},
    ],
)
def test_bad_headers_are_refused(wrong: dict[str, Any]) -> None:
    """Before a byte is reserved for them."""
    with pytest.raises(PeerError):
        check(replace(HOP, **wrong))


def test_bytes_of_is_a_view_where_it_can_be() -> None:
    """And a copy in the right order where not."""
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert np.shares_memory(bytes_of(array), array)
    assert bytes_of(array.T).tobytes() == array.T.tobytes()
    assert len(bytes_of(np.array(1.5, ml_dtypes.bfloat16))) == 2
    assert len(bytes_of(np.zeros((0, 4)))) == 0


def test_dtypes_are_known_by_the_name_that_arrays_have() -> None:
    """`array.dtype.name` is what travels."""
    assert all(np.zeros(1, dtype).dtype.name == name for name, dtype in DTYPES.items())


def test_numbers_of_a_restarted_process_are_new() -> None:
    """Peers remember the old ones."""
    bus = MemoryBroker().connect()
    first = Port(bus, PNodeId("p"), lambda *_: None)
    used = [first.next_transfer() for _ in range(100)]
    assert Port(bus, PNodeId("p"), lambda *_: None).next_transfer() > max(used)
