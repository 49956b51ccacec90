"""Self-attention: one head, several, and merged ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.nodes.attention import AttentionConfig, AttentionHeadConfig, FusedHeadsConfig
from dcnr.nodes.registry import NODE_TYPES
from dcnr.nodes.spec import ShapeError
from tests.nodes import cases
from tests.nodes.cases import Case, case
from tests.nodes.gradcheck import gradcheck
from tests.nodes.runs import Example, example, forward


@pytest.mark.parametrize("one", cases.ATTENTION, ids=lambda one: one.name)
def test_gradients(one: Case) -> None:
    """Backward is the derivative of forward, for the input and all matrices and biases."""
    gradcheck(one)


def test_merged_heads_compute_what_the_heads_compute() -> None:
    """The stored rows of a merged node are those of its heads, by canonical name."""
    backend = NumpyBackend()
    config = AttentionHeadConfig(input_dim=7, head_dim=4)
    members = ("copy", "a", "b", "stack")
    merged = case("fused_heads", FusedHeadsConfig.fuse([config, config]), [(5, 7)], members=members)
    given = example(merged, backend)
    (wanted,) = forward(backend, merged, given, "float64")
    outputs = []
    for head in ("a", "b"):
        alone = case("attention_head", config, [(5, 7)])
        params = {
            p.name: np.concatenate(
                [
                    given.params[p.name][part.start : part.stop]
                    for p2 in merged.build().parameters
                    if p2.name == p.name
                    for part in p2.parts
                    if part.node == head
                ]
            )
            for p in alone.build().parameters
        }
        outputs.append(forward(backend, alone, Example(given.inputs, params, ()), "float64")[0])
    np.testing.assert_allclose(np.concatenate(outputs, axis=-1), wanted, rtol=1e-12)


def test_parts_cover_the_rows_in_order_with_canonical_names() -> None:
    """All queries, then all keys, then all values; head after head."""
    config = FusedHeadsConfig.fuse([AttentionHeadConfig(input_dim=7, head_dim=2)] * 2)
    weight, bias = case("fused_heads", config, [(5, 7)], members=("copy", "a", "b", "stack")).build().parameters
    assert [(p.node, p.name) for p in weight.parts] == [(n, f"{x}_weight") for x in "qkv" for n in "ab"]
    assert [p.name for p in bias.parts] == ["q_bias", "q_bias", "k_bias", "k_bias", "v_bias", "v_bias"]
    edges = [0, *(p.stop for p in weight.parts)]
    assert edges == [p.start for p in weight.parts] + [weight.shape[0]] == [0, 2, 4, 6, 8, 10, 12]
    assert (weight.decay, bias.decay) == (True, False)


def test_a_causal_head_does_not_see_the_future() -> None:
    """Changing the last position leaves all others alone; without the mask it does not."""
    backend = NumpyBackend()
    for causal in (True, False):
        one = case("attention_head", {"input_dim": 7, "head_dim": 4, "causal": causal}, [(9, 7)])
        given = example(one, backend)
        x = given.inputs[0].copy()
        x[:, -1] += 1
        before, after = (np.asarray(forward(backend, one, g, "float64")[0]) for g in (given, replace(given, inputs=(x,))))
        assert np.array_equal(before[:, :-1], after[:, :-1]) is causal
        assert not np.array_equal(before[:, -1], after[:, -1])


def test_initial_spreads() -> None:
    """`output_init_std` scales the projection alone."""
    config = {"dim": 8, "num_heads": 2, "output_projection": True, "init_std": 0.1, "output_init_std": 0.01}
    found = {p.name: (p.std, p.shape) for p in case("attention", config, [(3, 8)]).build().parameters}
    assert found == {"qkv_weight": (0.1, (24, 8)), "qkv_bias": (None, (24,)), "out_weight": (0.01, (8, 8)), "out_bias": (None, (8,))}


def test_shapes() -> None:
    """A head gives head_dim columns; several give heads * head_dim, or come back to dim."""
    head, many = NODE_TYPES["attention_head"].shapes, NODE_TYPES["attention"].shapes
    assert head(AttentionHeadConfig(input_dim=7, head_dim=4, seq_len=9), ((5, 7),)) == ((5, 4),)
    assert many(AttentionConfig(input_dim=7, num_heads=3, head_dim=4), ((5, 7),)) == ((5, 12),)
    assert many(AttentionConfig(input_dim=7, num_heads=3, head_dim=4, output_projection=True), ((5, 7),)) == ((5, 7),)
    with pytest.raises(ShapeError, match=r"at most 9 positions \(seq_len\), got \[10, 7\]"):
        head(AttentionHeadConfig(input_dim=7, head_dim=4, seq_len=9), ((10, 7),))
    with pytest.raises(ShapeError, match=r"wants \[seq, 7\]"):
        head(AttentionHeadConfig(input_dim=7, head_dim=4), ((7,),))


def test_config_says_what_does_not_fit() -> None:
    """Odd heads with rope, and a width that heads do not divide."""
    with pytest.raises(ValidationError, match="head_dim must be even, got 5"):
        AttentionHeadConfig(input_dim=7, head_dim=5)
    with pytest.raises(ValidationError, match="dim 7 is not a multiple of num_heads 2"):
        AttentionConfig(input_dim=7, num_heads=2)


PIECEWISE = [one for one in cases.ATTENTION if NODE_TYPES[one.type].mixes(one.config, one.inputs) is None]


@pytest.mark.parametrize("one", PIECEWISE, ids=lambda one: one.name)
def test_a_sequence_in_pieces_gives_what_the_whole_gives(one: Case) -> None:
    """With a cache of the shape that the table says."""
    backend, given = NumpyBackend(), example(one, NumpyBackend())
    (whole,) = forward(backend, one, given, "float64")
    shape = NODE_TYPES[one.type].cache(one.config, one.inputs)
    assert shape is not None
    cache = backend.zeros((one.rows, *shape), "float64")
    length = one.inputs[0][0]
    half = (length + 1) // 2
    for first, last in ((0, half), *((at, at + 1) for at in range(half, min(length, half + 3)))):
        piece = replace(given, inputs=(given.inputs[0][:, first:last],))
        (y,) = forward(backend, one, piece, "float64", position=first, cache=cache)
        np.testing.assert_allclose(y, np.asarray(whole)[:, first:last], rtol=1e-9, atol=1e-12)
