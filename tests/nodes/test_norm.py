"""Layer normalisation."""

from __future__ import annotations

import numpy as np
import pytest

from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.nodes.norm import LayerNormConfig
from dcnr.nodes.registry import NODE_TYPES
from dcnr.nodes.spec import ShapeError
from tests.nodes import cases
from tests.nodes.cases import Case, case
from tests.nodes.gradcheck import gradcheck
from tests.nodes.runs import example, forward


@pytest.mark.parametrize("one", cases.NORM, ids=lambda one: one.name)
def test_gradients(one: Case) -> None:
    """Backward is the derivative of forward."""
    gradcheck(one)


def test_rows_get_mean_zero_and_variance_one_before_gain_and_bias() -> None:
    """The definition, undone."""
    one = case("layernorm", {"dim": 127, "eps": 1e-12}, [(7, 127)])
    given = example(one, NumpyBackend())
    (y,) = forward(NumpyBackend(), one, given, "float64")
    normal = (np.asarray(y) - given.params["bias"]) / given.params["weight"]
    np.testing.assert_allclose(normal.mean(axis=-1), 0, atol=1e-9)
    np.testing.assert_allclose(normal.var(axis=-1), 1, rtol=1e-6)


def test_parameters_start_at_one_and_zero_and_do_not_decay() -> None:
    """As everyone does it."""
    weight, bias = case("layernorm", {"dim": 7}, [(7,)]).build().parameters
    assert (weight.fill, weight.std, weight.decay) == (1.0, None, False)
    assert (bias.fill, bias.std, bias.decay) == (0.0, None, False)


def test_the_width_must_be_dim() -> None:
    """The message names the key."""
    with pytest.raises(ShapeError, match=r"last axis of 7 \(dim\), got \[8\]"):
        NODE_TYPES["layernorm"].shapes(LayerNormConfig(dim=7), ((8,),))
