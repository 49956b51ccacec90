"""A residual sum merged with what is before and after it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.nodes.activation import DropoutConfig
from dcnr.nodes.linear import LinearConfig
from dcnr.nodes.norm import LayerNormConfig
from dcnr.nodes.registry import NODE_TYPES
from dcnr.nodes.residual import ResidualNormConfig
from dcnr.nodes.spec import BuildArgs, ShapeError
from tests.nodes import cases
from tests.nodes.cases import Case, case
from tests.nodes.gradcheck import gradcheck
from tests.nodes.runs import example, make_env

LINEAR, DROPOUT, NORM = LinearConfig(in_dim=7, out_dim=33), DropoutConfig(rate=0.3), LayerNormConfig(dim=33)
MERGED = case(
    "residual_norm", ResidualNormConfig.fuse(LINEAR, DROPOUT, NORM), [(5, 7), (5, 33)], members=("down", "drop", "add", "copy", "norm")
)


@pytest.mark.parametrize("one", cases.RESIDUAL, ids=lambda one: one.name)
def test_gradients(one: Case) -> None:
    """Backward is the derivative of forward, with a gradient for the sum too."""
    gradcheck(one)


@pytest.mark.parametrize("training", [True, False])
def test_it_is_its_members_one_after_the_other(training: bool) -> None:
    """With the mask of the dropout's own id, and without one outside training; also where nobody else reads the sum."""
    backend = NumpyBackend()
    given = example(MERGED, backend)
    node = MERGED.build()
    env = replace(make_env(backend, node, MERGED, given.params, "float64"), training=training)
    (y, total), saved = node.forward(env, given.inputs)
    x, residual = given.inputs
    branch = x @ given.params["weight"].T + given.params["bias"]
    drop = NODE_TYPES["dropout"].build(BuildArgs("drop", DROPOUT, ((5, 33),), ((5, 33),), False, ("drop",)))
    (dropped,), _ = drop.forward(env, (branch,))
    np.testing.assert_allclose(total, dropped + residual)
    wanted, mean, rstd = backend.layernorm(total.reshape(-1, 33), given.params["norm_weight"], given.params["norm_bias"], NORM.eps)
    np.testing.assert_allclose(y, wanted.reshape(y.shape))
    dy = given.grads[0]
    into = np.empty((2, 33))
    dtotal = backend.layernorm_backward(
        dy.reshape(-1, 33), total.reshape(-1, 33), given.params["norm_weight"], mean, rstd, into[0], into[1], False
    )
    dresidual = node.backward(env, saved, (dy, None))[1]
    assert dresidual is not None
    np.testing.assert_allclose(dresidual, dtotal.reshape(total.shape))


def test_each_output_may_go_unused() -> None:
    """Without a gradient of the normalised sum, that of the sum passes through, and the norm learns nothing."""
    backend = NumpyBackend()
    given = example(MERGED, backend)
    node = MERGED.build()
    env = make_env(backend, node, MERGED, given.params, "float64")
    _, saved = node.forward(env, given.inputs)
    _, dresidual = node.backward(env, saved, (None, given.grads[1]))
    assert dresidual is not None
    np.testing.assert_array_equal(dresidual, given.grads[1])
    np.testing.assert_array_equal(env.grads["norm_weight"], 0)


def test_parameters_belong_to_the_nodes_of_the_file() -> None:
    """The linear layer's are called as always, since another node may be tied to its weight."""
    found = {one.name: (one.parts[0].node, one.parts[0].name) for one in MERGED.build().parameters}
    assert found == {
        "weight": ("down", "weight"), "bias": ("down", "bias"), "norm_weight": ("norm", "weight"), "norm_bias": ("norm", "bias"),
    }  # fmt: skip


def test_it_wants_a_residual_shaped_as_its_branch() -> None:
    """And a norm as wide as both."""
    shapes, config = NODE_TYPES["residual_norm"].shapes, ResidualNormConfig.fuse(LINEAR, DROPOUT, NORM)
    with pytest.raises(ShapeError, match=r"residual of shape \[5, 33\], got \[5, 7\]"):
        shapes(config, ((5, 7), (5, 7)))
    with pytest.raises(ShapeError, match=r"last axis of 33 \(dim\)"):
        shapes(ResidualNormConfig.fuse(None, None, NORM), ((5, 7), (5, 7)))
