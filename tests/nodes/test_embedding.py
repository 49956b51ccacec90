"""Embeddings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.nodes.embedding import EmbedderConfig
from dcnr.nodes.registry import NODE_TYPES
from dcnr.nodes.spec import ShapeError
from tests.nodes import cases
from tests.nodes.cases import Case, case
from tests.nodes.gradcheck import gradcheck
from tests.nodes.runs import example, forward


@pytest.mark.parametrize("one", cases.EMBEDDING, ids=lambda one: one.name)
def test_gradients(one: Case) -> None:
    """Backward is the derivative of forward, also where ids repeat."""
    gradcheck(one)


def test_learned_positions_are_added_from_the_first_on() -> None:
    """A short sequence uses the first rows of the table."""
    one = case("embedder", {"vocab_size": 7, "dim": 3, "seq_len": 9, "position_encoding": "learned"}, [(4,)], ids=(7,))
    given = example(one, NumpyBackend())
    (y,) = forward(NumpyBackend(), one, given, "float64")
    np.testing.assert_allclose(y, given.params["weight"][given.inputs[0]] + given.params["position_weight"][:4])


def test_rope_leaves_the_first_position_and_every_length_as_they_are() -> None:
    """Rotation by position 0 is none; other positions keep their norm but change."""
    one = case("embedder", {"vocab_size": 7, "dim": 6, "seq_len": 9, "position_encoding": "rope"}, [(9,)], ids=(7,))
    given = example(one, NumpyBackend())
    (y,) = forward(NumpyBackend(), one, given, "float64")
    plain = given.params["weight"][given.inputs[0]]
    np.testing.assert_allclose(np.asarray(y)[:, 0], plain[:, 0])
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(plain, axis=-1))
    assert np.abs(np.asarray(y)[:, 5] - plain[:, 5]).max() > 0.1


def test_shapes() -> None:
    """Fed ids are as long as seq_len; an edge may bring fewer, never more."""
    rule = NODE_TYPES["embedder"].shapes
    config = EmbedderConfig.model_validate({"vocab_size": "10", "dim": "4", "seq_len": "8"})
    assert rule(config, (None,)) == ((8, 4),)
    assert rule(config, ((5,),)) == ((5, 4),)
    with pytest.raises(ShapeError, match=r"at most 8 positions \(seq_len\), got \[9\]"):
        rule(config, ((9,),))


def test_rope_needs_pairs() -> None:
    """An odd width cannot be rotated."""
    with pytest.raises(ValidationError, match="dim must be even, got 3"):
        EmbedderConfig(vocab_size=5, dim=3, seq_len=2, position_encoding="rope")


@pytest.mark.parametrize("positions", ["learned", "rope", "none"])
def test_a_later_piece_of_a_sequence_has_its_own_positions(positions: str) -> None:
    """`env.position` says where it begins."""
    one = case("embedder", {"vocab_size": 7, "dim": 6, "seq_len": 9, "position_encoding": positions}, [(9,)], ids=(7,))
    backend, given = NumpyBackend(), example(one, NumpyBackend())
    (whole,) = forward(backend, one, given, "float64")
    rest = replace(given, inputs=(given.inputs[0][:, 5:],))
    (y,) = forward(backend, one, rest, "float64", position=5)
    np.testing.assert_allclose(y, np.asarray(whole)[:, 5:])
