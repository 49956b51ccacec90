"""What a node type says that its forward keeps is what it keeps."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.nodes.registry import NODE_TYPES
from tests.nodes.cases import CASES, Case
from tests.nodes.runs import example, make_env

BACKEND = NumpyBackend()


def same(array: np.ndarray, other: object) -> bool:
    """Whether both are one tensor, be it in another shape."""
    return isinstance(other, np.ndarray) and array.size == other.size and np.shares_memory(array, other)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_forward_keeps_what_its_type_says(case: Case) -> None:
    """Which inputs and outputs, how many numbers of its own in float16 and in float32; only the numpy backend has no log-sum-exps."""
    given, node = example(case, BACKEND), case.build()
    env = make_env(BACKEND, node, case, given.params, "float16")
    inputs = tuple(BACKEND.from_host(x, "float16") for x in given.inputs)
    outputs, saved = node.forward(env, inputs)
    kept = [array for array in saved if array is not None]
    rest = [array for array in kept if not any(same(array, other) for other in (*inputs, *outputs))]
    said = NODE_TYPES[case.type].keeps(case.config, case.inputs, NODE_TYPES[case.type].shapes(case.config, case.inputs))
    assert {slot for slot, x in enumerate(inputs) if any(same(array, x) for array in kept)} == set(said.inputs)
    assert {slot for slot, y in enumerate(outputs) if any(same(array, y) for array in kept)} == set(said.outputs)
    assert sum(array.size for array in rest if array.dtype == np.float16) == said.own * case.rows
    log_sum_exps = prod(case.inputs[0][:-1]) if "qkv_weight" in given.params else 0
    if log_sum_exps:
        assert said.floats % log_sum_exps == 0
    else:
        assert sum(array.size for array in rest if array.dtype == np.float32) == said.floats * case.rows
