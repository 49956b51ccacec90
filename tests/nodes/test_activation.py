"""Activations and dropout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dcnr.backends.base import HostArray, dropout_scale
from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.nodes.activation import DropoutAddConfig, DropoutConfig, SwigluConfig, stream_of
from dcnr.nodes.registry import NODE_TYPES
from dcnr.nodes.spec import BuildArgs, ShapeError
from tests.nodes import cases
from tests.nodes.cases import Case, case
from tests.nodes.gradcheck import gradcheck
from tests.nodes.runs import example, make_env


@pytest.mark.parametrize("one", cases.ACTIVATION, ids=lambda one: one.name)
def test_gradients(one: Case) -> None:
    """Backward is the derivative of forward, with the mask of the same step."""
    gradcheck(one)


def _dropout(rows: HostArray, first_row: int, step: int = 5) -> HostArray:
    """Dropout of `rows`, the first of which has index `first_row` in the batch."""
    one = case("dropout", {"rate": 0.4}, [rows.shape[1:]])
    node = one.build()
    env = replace(make_env(NumpyBackend(), node, one, {}, "float32"), first_row=first_row, step=step)
    return np.asarray(node.forward(env, (rows,))[0][0])


def test_masks_do_not_depend_on_how_the_batch_is_cut() -> None:
    """Shards and micro-batches see the mask of the whole batch."""
    x = np.ones((9, 7, 5), np.float32)
    whole = _dropout(x, 0)
    cut = np.concatenate([_dropout(x[:2], 0), _dropout(x[2:3], 2), _dropout(x[3:], 3)])
    np.testing.assert_array_equal(whole, cut)
    assert not np.array_equal(whole, _dropout(x, 0, step=6))


def test_the_rest_is_scaled_up() -> None:
    """A share `rate` (in steps of 2**-16) is zero, the rest is x / (1 - that share)."""
    y = _dropout(np.ones((100, 1000), np.float32), 0)
    assert set(np.unique(y)) == {np.float32(0), np.float32(dropout_scale(0.4))}
    assert abs((y == 0).mean() - 0.4) < 0.005


def test_without_training_dropout_is_the_identity() -> None:
    """And with a residual it is the sum."""
    x = np.ones((2, 7), np.float32)
    for one, inputs in (
        (case("dropout", {"rate": 0.4}, [(7,)]), (x,)),
        (case("dropout_add", DropoutAddConfig.fuse(DropoutConfig(rate=0.4)), [(7,), (7,)]), (x, x)),
    ):
        node = one.build()
        env = replace(make_env(NumpyBackend(), node, one, {}, "float32"), training=False)
        np.testing.assert_array_equal(node.forward(env, inputs)[0][0], sum(inputs))


def test_merged_dropout_has_the_mask_of_its_member() -> None:
    """dropout_add is add(dropout(x), residual), bit for bit, gradients too."""
    backend = NumpyBackend()
    rng = np.random.default_rng(3)
    x, residual, dy = (rng.normal(size=(3, 7, 33)).astype(np.float32) for _ in range(3))
    plain = case("dropout", {"rate": 0.4}, [(7, 33)]).build()
    args = BuildArgs("sum", DropoutAddConfig.fuse(DropoutConfig(rate=0.4)), ((7, 33),) * 2, ((7, 33),), False, ("node", "sum"))
    merged = NODE_TYPES["dropout_add"].build(args)
    env = make_env(backend, plain, case("dropout", {"rate": 0.4}, [(7, 33)]), {}, "float32")
    (dropped,), _ = plain.forward(env, (x,))
    (y,), saved = merged.forward(env, (x, residual))
    np.testing.assert_array_equal(y, dropped + residual)
    dx, dr = merged.backward(env, saved, (dy,))
    np.testing.assert_array_equal(dx, plain.backward(env, (), (dy,))[0])
    np.testing.assert_array_equal(dr, dy)


def test_streams_differ_between_nodes() -> None:
    """crc32 of the id: a constant of the format, because a resumed session must see the same masks."""
    assert stream_of("attn_dropout") == 0x6E396970
    assert stream_of("ffn_dropout") != stream_of("attn_dropout")


def test_swiglu_shapes() -> None:
    """The last axis is halved; each optional key is checked."""
    rule = NODE_TYPES["swiglu"].shapes
    assert rule(SwigluConfig(), ((7, 8),)) == ((7, 4),)
    assert rule(SwigluConfig(in_dim=8, out_dim=4, dim=4), ((7, 8),)) == ((7, 4),)
    with pytest.raises(ShapeError, match="even last axis"):
        rule(SwigluConfig(), ((7,),))
    for key, value in (("in_dim", 4), ("out_dim", 8), ("dim", 5)):
        with pytest.raises(ShapeError, match=key):
            rule(SwigluConfig.model_validate({key: value}), ((7, 8),))


def test_a_residual_must_have_the_same_shape() -> None:
    """No broadcasting by accident."""
    with pytest.raises(ShapeError, match=r"residual of shape \[7\], got \[8\]"):
        NODE_TYPES["dropout_add"].shapes(DropoutAddConfig.fuse(DropoutConfig()), ((7,), (8,)))


def test_activations_read_the_example_as_they_should() -> None:
    """Values of relu, silu and swiglu at a few points."""
    backend = NumpyBackend()
    x = np.array([[-1.0, 0.0, 2.0, 3.0]])
    found = {}
    for kind in ("relu", "silu", "swiglu"):
        one = case(kind, {}, [(4,)])
        node = one.build()
        (found[kind],), _ = node.forward(make_env(backend, node, one, example(one, backend).params, "float64"), (x,))
    sigmoid = 1 / (1 + np.exp(-x))
    np.testing.assert_allclose(found["relu"], [[0, 0, 2, 3]])
    np.testing.assert_allclose(found["silu"], x * sigmoid)
    np.testing.assert_allclose(found["swiglu"], x[:, :2] * (x * sigmoid)[:, 2:])
