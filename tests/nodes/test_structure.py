"""Nodes that route, cut and join."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.errors import InvariantError
from dcnr.nodes.base import Shape
from dcnr.nodes.registry import NODE_TYPES
from dcnr.nodes.spec import BuildArgs, NodeConfig, ShapeError
from dcnr.nodes.structure import MaskConfig, ReshapeConfig, SplitConfig
from tests.nodes import cases
from tests.nodes.cases import Case, case
from tests.nodes.gradcheck import gradcheck
from tests.nodes.runs import example, forward, make_env


@pytest.mark.parametrize("one", cases.STRUCTURE, ids=lambda one: one.name)
def test_gradients(one: Case) -> None:
    """Backward is the derivative of forward, for every input."""
    gradcheck(one)


def test_a_broadcast_sums_the_gradients_it_gets() -> None:
    """Outputs that nobody read give None; if nobody read any, so does the broadcast."""
    one = case("broadcast", {"num_outputs": 3}, [(2,)])
    node, a, b = one.build(), np.ones((1, 2), np.float32), np.full((1, 2), 2, np.float32)
    env = make_env(NumpyBackend(), node, one, {}, "float32")
    np.testing.assert_array_equal(node.backward(env, (), (a, None, b))[0], a + b)
    assert node.backward(env, (), (None, b, None))[0] is b
    assert node.backward(env, (), (None, None, None)) == (None,)


def test_an_unused_piece_of_a_split_has_gradient_zero() -> None:
    """The other pieces keep their place."""
    one = case("split", {"sizes": [1, 2]}, [(3,)])
    node, x = one.build(), np.ones((2, 3), np.float32)
    env = make_env(NumpyBackend(), node, one, {}, "float32")
    _, saved = node.forward(env, (x,))
    np.testing.assert_array_equal(node.backward(env, saved, (None, x[:, :2]))[0], [[0, 1, 1]] * 2)


def test_axes_do_not_count_the_batch() -> None:
    """Axis 0 of a config is the first axis after the batch."""
    one = case("stack", {"axis": "0"}, [(1, 3), (2, 3)])
    given = example(one, NumpyBackend())
    (y,) = forward(NumpyBackend(), one, given, "float64")
    np.testing.assert_array_equal(y, np.concatenate(given.inputs, axis=1))


def test_a_random_mask_does_not_rescale_and_rests_outside_training() -> None:
    """Kept elements are as they were."""
    one = case("mask", {"kind": "random", "rate": 0.5}, [(127,)])
    node, x = one.build(), np.ones((7, 127), np.float32)
    env = make_env(NumpyBackend(), node, one, {}, "float32")
    masked = np.asarray(node.forward(env, (x,))[0][0])
    assert set(np.unique(masked)) == {0.0, 1.0}
    assert node.forward(replace(env, training=False), (x,))[0][0] is x


def test_a_causal_mask_fills_above_the_diagonal() -> None:
    """Row i keeps columns 0 to i; float16, which does not reach -1e9, gets an infinity and no warning."""
    one = case("mask", {}, [(3, 3)])
    node = one.build()
    for precision, fill in (("float32", -1e9), ("float16", -np.inf)):
        env = make_env(NumpyBackend(), node, one, {}, "float32")
        ((y,), _) = node.forward(env, (np.ones((1, 3, 3), precision),))
        np.testing.assert_array_equal(y[0], np.where(np.tri(3, dtype=bool), 1, fill).astype(precision))


@pytest.mark.parametrize(
    ("kind", "config", "inputs", "outputs"),
    [
        ("broadcast", {"num_outputs": "2"}, [(7, 3)], [(7, 3), (7, 3)]),
        ("split", {"num_outputs": "3"}, [(7, 6)], [(7, 2)] * 3),
        ("split", {"sizes": "[3, 4]", "axis": "0"}, [(7, 6)], [(3, 6), (4, 6)]),
        ("stack", {"axis": "-1"}, [(7, 2), (7, 3)], [(7, 5)]),
        ("add", {}, [(7, 2)] * 3, [(7, 2)]),
        ("reshape", {"shape": "-1, 2"}, [(7, 4)], [(14, 2)]),
        ("reshape", {"shape": "28"}, [(7, 4)], [(28,)]),
        ("mask", {}, [(7, 7)], [(7, 7)]),
    ],
)
def test_shapes(kind: str, config: dict[str, str], inputs: list[Shape], outputs: list[Shape]) -> None:
    """Every rule, with config values as files write them."""
    row = NODE_TYPES[kind]
    resolved = row.config.model_validate(config)
    assert row.shapes(resolved, tuple(inputs)) == tuple(outputs)
    assert row.outputs(resolved) == len(outputs)


@pytest.mark.parametrize(
    ("kind", "config", "inputs", "message"),
    [
        ("split", {"num_outputs": 3}, [(7, 4)], "divides into 3 equal pieces"),
        ("split", {"sizes": [1, 2]}, [(7, 4)], "an axis of 3"),
        ("split", {"sizes": [1, 2], "axis": 2}, [(7, 3)], "an input that has axis 2"),
        ("stack", {}, [(7, 2), (6, 2)], "only along axis 1"),
        ("stack", {}, [(7, 2), (7, 2, 1)], "only along axis 1"),
        ("stack", {"num_inputs": 3}, [(7, 2), (7, 2)], "wants 3 inputs, got 2"),
        ("add", {}, [(7, 2), (7, 3)], r"one shape \[7, 2\], got \[7, 3\]"),
        ("add", {}, [(7, 2)], "two or more inputs, got 1"),
        ("reshape", {"shape": [3, -1]}, [(7, 2)], r"fits shape \[3, -1\]"),
        ("reshape", {"shape": [7]}, [(7, 2)], r"fits shape \[7\]"),
        ("mask", {}, [(7,)], "at least two axes"),
    ],
)
def test_what_does_not_fit_is_refused(kind: str, config: dict[str, object], inputs: list[Shape], message: str) -> None:
    """The message says what was wanted and what came."""
    row = NODE_TYPES[kind]
    with pytest.raises(ShapeError, match=message):
        row.shapes(row.config.model_validate(config), tuple(inputs))


def test_configs_that_contradict_themselves_are_refused() -> None:
    """Both or neither way to split, several unknown extents, a share of everything."""
    with pytest.raises(ValidationError, match="either num_outputs or sizes"):
        SplitConfig()
    with pytest.raises(ValidationError, match="at most one -1"):
        ReshapeConfig(shape=(-1, -1))
    with pytest.raises(ValidationError, match="less than 1"):
        MaskConfig(rate=1.0)


def test_the_last_position_of_a_sequence() -> None:
    """Of any length; training has no such node."""
    row = NODE_TYPES["last_position"]
    node = row.build(BuildArgs("last", NodeConfig(), ((4, 3),), ((1, 3),), False, ("last",)))
    x = np.arange(6.0).reshape(1, 2, 3)
    assert row.shapes(NodeConfig(), ((4, 3),)) == ((1, 3),)
    (y,), saved = node.forward(None, (x,))  # type: ignore[arg-type]
    np.testing.assert_array_equal(y, [[[3.0, 4.0, 5.0]]])
    with pytest.raises(InvariantError):
        node.backward(None, saved, (y,))  # type: ignore[arg-type]
