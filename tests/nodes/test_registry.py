"""The table of node types."""

from __future__ import annotations

import pytest

from dcnr.nodes.registry import NODE_TYPES, find_type
from tests.nodes.cases import CASES, Case


def test_names_and_aliases_are_found_in_any_case() -> None:
    """And nothing else is."""
    for row in NODE_TYPES.values():
        for name in (row.name, *row.aliases):
            assert find_type(name.upper()) is find_type(f" {name} ") is row
    assert find_type("MultiHeadAttention") is NODE_TYPES["attention"]
    assert find_type("convolution") is None


def test_no_name_is_taken_twice() -> None:
    """Names and aliases of all rows together."""
    names = [name for row in NODE_TYPES.values() for name in (row.name, *row.aliases)]
    assert len(names) == len(set(names))


def test_every_trained_type_has_its_gradients_checked() -> None:
    """No row without a case; `last_position` is for generation alone."""
    trained = {name for name, row in NODE_TYPES.items() if not row.text_only and name != "last_position"}
    assert trained == {case.type for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_arity_and_flops_fit_the_shapes(case: Case) -> None:
    """A row's parts agree with each other."""
    row = NODE_TYPES[case.type]
    outputs = row.shapes(case.config, case.inputs)
    assert row.inputs(case.config) in (None, len(case.inputs))
    assert row.outputs(case.config) == len(outputs)
    assert row.flops(case.config, case.inputs, outputs) >= 0
    assert row.summary.endswith(".")


def test_flops_of_products() -> None:
    """Two per multiplication and addition; half of the scores where the mask is causal."""
    linear, attention = NODE_TYPES["linear"], NODE_TYPES["attention"]
    assert linear.flops(linear.config.model_validate({"in_dim": 3, "out_dim": 5}), ((7, 3),), ((7, 5),)) == 2 * 7 * 3 * 5
    keys = {"dim": 8, "num_heads": 2, "output_projection": True}
    products = 4 * 2 * 7 * 8 * 8
    for causal, scores in ((True, 2 * 7 * 7 * 8), (False, 4 * 7 * 7 * 8)):
        config = attention.config.model_validate({**keys, "causal": causal})
        assert attention.flops(config, ((7, 8),), ((7, 8),)) == products + scores
