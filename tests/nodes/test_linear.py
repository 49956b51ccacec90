"""Linear layers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from pydantic import ValidationError

from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.nodes.base import Node
from dcnr.nodes.linear import LinearActivationConfig, LinearConfig, linear_parameters
from dcnr.nodes.registry import NODE_TYPES
from dcnr.nodes.spec import BuildArgs, ShapeError
from tests.nodes import cases
from tests.nodes.cases import Case, case
from tests.nodes.gradcheck import gradcheck
from tests.nodes.runs import example, forward


@pytest.mark.parametrize("one", cases.LINEAR, ids=lambda one: one.name)
def test_gradients(one: Case) -> None:
    """Backward is the derivative of forward."""
    gradcheck(one)


def test_forward_is_x_times_w_transposed_plus_b() -> None:
    """The definition, written with einsum."""
    one = case("linear", {"in_dim": 7, "out_dim": 33}, [(5, 7)])
    given = example(one, NumpyBackend())
    (y,) = forward(NumpyBackend(), one, given, "float64")
    wanted = np.einsum("bti,oi->bto", given.inputs[0], given.params["weight"]) + given.params["bias"]
    np.testing.assert_allclose(y, wanted, rtol=1e-12)


@pytest.mark.parametrize(
    ("init", "std"), [("normal", 0.05), ("xavier", math.sqrt(2 / 400)), ("kaiming", math.sqrt(2 / 300)), ("zeros", None)]
)
def test_inits(init: str, std: float | None) -> None:
    """Each init has its standard deviation; biases start at zero and do not decay."""
    config = LinearConfig.model_validate({"in_dim": "300", "out_dim": "100", "init": init, "init_std": "0.05"})
    weight, bias = linear_parameters("up", config, tied=False)
    assert weight.std == (None if std is None else pytest.approx(std))
    assert (weight.shape, weight.decay) == ((100, 300), True)
    assert (bias.shape, bias.std, bias.fill, bias.decay) == ((100,), None, 0.0, False)


def test_a_tied_layer_owns_only_its_bias() -> None:
    """The weight is another node's."""
    config = LinearConfig(in_dim=3, out_dim=5)
    assert [p.name for p in linear_parameters("head", config, tied=True)] == ["bias"]


def test_a_merged_layer_keeps_the_names_of_its_linear_member() -> None:
    """Checkpoints of the merged and of the plain graph are the same."""
    config = LinearActivationConfig.fuse(LinearConfig(in_dim=3, out_dim=4, optimizer="adam"), "gelu")
    args = BuildArgs("act", config, ((3,),), ((4,),), False, ("up", "act"))
    node: Node = NODE_TYPES["linear_activation"].build(args)
    assert [(part.node, part.name) for p in node.parameters for part in p.parts] == [("up", "weight"), ("up", "bias")]
    assert config.optimizer == "adam"


def test_shapes() -> None:
    """Only the last axis changes, and it must be in_dim."""
    rule = NODE_TYPES["linear"].shapes
    config = LinearConfig(in_dim=3, out_dim=5)
    assert rule(config, ((2, 7, 3),)) == ((2, 7, 5),)
    with pytest.raises(ShapeError, match=r"wants a last axis of 3 \(in_dim\), got \[7, 4\]"):
        rule(config, ((7, 4),))
    with pytest.raises(ShapeError, match="wants an edge into slot 0"):
        rule(config, (None,))


def test_unknown_keys_and_wrong_values_are_refused() -> None:
    """A misspelt key never passes in silence."""
    with pytest.raises(ValidationError, match="out_dims"):
        LinearConfig.model_validate({"in_dim": 3, "out_dim": 4, "out_dims": 4})
    with pytest.raises(ValidationError, match="in_dim"):
        LinearConfig.model_validate({"in_dim": "0", "out_dim": 4})
